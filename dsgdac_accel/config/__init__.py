"""Settings, and how any configuration is read and written.

Reading (`parsing`) and writing (`output`) work for every tree of frozen dataclasses, so tasks nest `GossipConfig` in
configurations of their own.
"""

from dsgdac_accel.config.gossip import GossipConfig
from dsgdac_accel.config.output import config_fingerprint, config_to_dict, dump_config, write_config
from dsgdac_accel.config.parsing import config_from_command_line, load_config, parse_config
from dsgdac_accel.config.strict_yaml import ConfigError

__all__ = [
    "ConfigError",
    "GossipConfig",
    "config_fingerprint",
    "config_from_command_line",
    "config_to_dict",
    "dump_config",
    "load_config",
    "parse_config",
    "write_config",
]
