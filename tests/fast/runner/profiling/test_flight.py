"""What torch's flight recorder is told through the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.distributed.watchdog import enable_flight_recorder


def test_recorder_is_on_and_writes_below_the_log_folder(tmp_path: Path) -> None:
    environment = {"HOME": "/root"}
    enable_flight_recorder(tmp_path / "log", environment)
    assert environment == {
        "HOME": "/root",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/log/flight-recorder/rank_",
    }
    assert (tmp_path / "log" / "flight-recorder").is_dir()


@pytest.mark.parametrize(
    "own",
    [
        {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_FR_DUMP_TEMP_FILE": "/tmp/a_", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"},
        {
            "TORCH_NCCL_TRACE_BUFFER_SIZE": "7",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/b_",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        },
    ],
)
def test_what_the_user_has_set_stays_by_any_name_that_torch_knows(tmp_path: Path, own: dict[str, str]) -> None:
    environment = dict(own)
    enable_flight_recorder(tmp_path, environment)
    assert environment == own
    assert not (tmp_path / "flight-recorder").exists()
