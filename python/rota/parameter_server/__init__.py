"""The parts of rota.ParameterServer (server.py): parameters that servers hold and workers train."""
