"""Histories of jobs: the recorded calls and reads of each process, checked against a model."""

from .events import Event, Fault, History, Push, Read
from .numbers import Numbers
from .recorder import RecordedStore, events_in

__all__ = ["Event", "Fault", "History", "Numbers", "Push", "Read", "RecordedStore", "events_in"]
