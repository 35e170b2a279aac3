"""Names of DeepSpeed's launcher that other launchers import."""

import os

DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
