"""Programs of users, each of which runs in all the ways in which kvstore can exchange gradients."""
