"""The commands of the guide are taken by SGLang's own parser."""

import argparse
import re
import shlex
from pathlib import Path

from sglang.srt.server_args import ServerArgs

GUIDE = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text()
SHOWN = re.compile(r"^<!-- needs: gpu, sglang -->\n```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_commands_are_taken():
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    commands = SHOWN.findall(GUIDE)
    assert len(commands) >= 3
    for command in commands:
        words = shlex.split(command.replace("\\\n", " "))
        assert words[:3] == ["python", "-m", "sglang.launch_server"]
        given = parser.parse_args(words[3:])
        names = given.attention_backend, given.prefill_attention_backend
        assert "attn" in names
        assert given.page_size == 64


def test_every_refusal_is_shown():
    for setting in ("--page-size", "--enable-unified-memory", "--dcp-size", "--kv-cache-dtype"):
        assert setting in GUIDE.partition("## What is refused")[2]
