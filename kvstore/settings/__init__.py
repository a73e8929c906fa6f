"""Options and variables of stores, parameter servers and launchers; rank, role and job of this process."""
