"""These tests need the server of run.py: a plain run of pytest does not collect them at all."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("GNA_REMOTE") else ["*"]
