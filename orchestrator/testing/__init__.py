"""Fakes shipped as product code: real loopback servers and scripted parts for trying things out."""
