"""The verbs: what a launch script or a notebook calls.

Each takes an experiment, does its work in other processes where a compiler is involved, and
returns the plain data that its JSON file holds.  With ``out`` it also writes the files.
"""

from spmdlab.lab.comparison import compare
from spmdlab.lab.explanation import analyze, explain
from spmdlab.lab.selection import select
from spmdlab.lab.training import train
from spmdlab.lab.verification import verify

__all__ = ["analyze", "compare", "explain", "select", "train", "verify"]
