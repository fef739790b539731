"""Tests of what is read from the backwards of compiled regions."""
