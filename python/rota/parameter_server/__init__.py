"""Parameters that servers hold and workers train. See docs/parameter-server.md."""

from rota.parameter_server.server import ParameterServer

__all__ = ["ParameterServer"]
