"""A job of any size in one process: the real state machines, on simulated processors and links.

- `network`: events in virtual time; hosts, their links and cores
- `processes`: a process: messages one after the other, each for its price
- `costs`: what that price is; `calibrate` measures it, with the real processes of `real`
- `wire`: how many bytes a message has
- `scheduler`, `server`, `worker`: the machines of the three roles, each in its process
- `programs`: what workers do
- `job`: builds all of it, and runs it
"""
