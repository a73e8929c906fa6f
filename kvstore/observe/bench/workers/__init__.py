"""What the processes of a peer do: make arrays, sum them, check the sums, time the calls."""
