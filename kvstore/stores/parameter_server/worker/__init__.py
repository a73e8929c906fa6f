"""The worker's part of a store on servers: verbs become requests about slices, and replies become arrays."""
