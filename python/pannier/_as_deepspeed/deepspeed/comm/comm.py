"""The same names under their longer path."""

from pannier.comm import *  # noqa: F403
