"""Packaged workflows, and graphs that show one synthesis step beside its text form."""
