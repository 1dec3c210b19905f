# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Planning without a process group: models from lists of tables, machines by name, what-if."""

from dreamshard_planner.offline.jobs import Job, OfflineModel, TableSpec, read_model, read_table_list

__all__ = ["Job", "OfflineModel", "TableSpec", "read_model", "read_table_list"]
