"""Options and variables: of stores, of parameter servers, of launchers; who this process is in its job."""
