"""The store on MPI."""
