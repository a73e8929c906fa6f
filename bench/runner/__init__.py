"""What measures every claim, and writes its page."""
