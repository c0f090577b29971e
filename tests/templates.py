"""Chat templates written for the tests, in the ways of real ones, and the special tokens that they use."""

from __future__ import annotations

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"),
    *("<|begin|>", "<|head|>", "<|/head|>", "<|eot|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[CALLS]", "[ARGS]", "[RESULT]", "[/RESULT]"),
)

CHATML = """
{%- if tools %}{{ "<|im_start|>system\\n" }}
    {%- if messages[0].role == "system" %}{{ messages[0].content ~ "\\n\\n" }}{% endif %}
    {%- for tool in tools %}{{ tool | tojson ~ "\\n" }}{% endfor %}
    {{- "<|im_end|>\\n" }}
{%- elif messages[0].role == "system" %}{{ "<|im_start|>system\\n" ~ messages[0].content ~ "<|im_end|>\\n" }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == "tool" %}
        {%- if loop.first or loop.previtem.role != "tool" %}{{ "<|im_start|>user" }}{% endif %}
        {{- "\\n<result>\\n" ~ m.content ~ "\\n</result>" }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{ "<|im_end|>\\n" }}{% endif %}
    {%- elif m.role == "assistant" %}
        {{- "<|im_start|>assistant\\n" }}
        {%- if m.reasoning_content and loop.last %}{{ "<think>\\n" ~ m.reasoning_content ~ "\\n</think>\\n\\n" }}{% endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- "\\n" if m.content or not loop.first else "" }}
            {{- "<tool_call>\\n" ~ {"name": call.function.name, "arguments": call.function.arguments} | tojson ~ "\\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\\n" }}
    {%- elif m.role == "user" or not loop.first %}{{ "<|im_start|>" ~ m.role ~ "\\n" ~ m.content ~ "<|im_end|>\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ "<think>\\n\\n</think>\\n\\n" }}{% endif %}
{%- endif %}"""
"""Qwen's way: calls as JSON between special tokens, results merged, earlier reasoning left out, an empty think block in the prompt."""

LLAMA = """
{{- bos_token }}
{%- set day = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{{- "<|head|>system<|/head|>\\n\\nToday: " ~ day ~ "\\n" }}
{%- if messages[0].role == "system" %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}
{%- if tools %}{% for tool in tools %}{{ tool.function | tojson(indent=4) }}{% endfor %}{% endif %}
{{- "<|eot|>" }}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception("one call at a time") }}{% endif %}
        {%- set f = m.tool_calls[0].function %}
        {{- "<|head|>assistant<|/head|>\\n\\n" ~ '{"name": "' ~ f.name ~ '", "parameters": ' ~ f.arguments | tojson ~ "}<|eot|>" }}
    {%- elif m.role == "tool" %}{{ "<|head|>ipython<|/head|>\\n\\n" ~ {"output": m.content} | tojson ~ "<|eot|>" }}
    {%- else %}{{ "<|head|>" ~ m.role ~ "<|/head|>\\n\\n" ~ m.content | trim ~ "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|head|>assistant<|/head|>\\n\\n" }}{% endif %}"""
"""Llama-3's way: bare calls, one at a time, results as JSON, texts trimmed, a date."""

GLM = """
{%- for m in messages %}
    {%- if m.role == "user" %}{{ "<|user|>\\n" ~ m.content }}
    {%- elif m.role == "assistant" %}{{ "<|assistant|>\\n" ~ m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- "<tool_call>" ~ call.function.name }}
            {%- for key, value in call.function.arguments.items() %}
                {{- "\\n" ~ key ~ "=" ~ (value if value is string else value | tojson) }}
            {%- endfor %}
            {{- "</tool_call>" }}
        {%- endfor %}
    {%- elif m.role == "tool" %}
        {%- if loop.previtem.role != "tool" %}{{ "<|observation|>" }}{% endif %}{{ "\\n" ~ m.content }}
    {%- else %}{{ raise_exception("no system messages") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|assistant|>\\n" }}{% endif %}"""
"""GLM's way: no token ends a turn, the next header does; arguments must be an object and are no JSON."""

MISTRAL = """
{{- bos_token }}
{%- set users = messages | selectattr("role", "equalto", "user") | list %}
{%- for m in messages %}
    {%- if m.role == "user" %}
        {%- if tools and m == users[-1] %}{{ "[TOOLS]" ~ tools | tojson ~ "[/TOOLS]" }}{% endif %}
        {{- "[INST]" ~ m.content ~ "[/INST]" }}
    {%- elif m.role == "tool" %}
        {%- if m.tool_call_id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif %}
        {{- "[RESULT]" ~ m.tool_call_id ~ " " ~ m.content ~ "[/RESULT]" }}
    {%- elif m.role == "assistant" %}
        {%- for call in m.tool_calls or [] %}
            {%- if call.id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif %}
            {{- "[CALLS]" ~ call.function.name ~ "[ARGS]" ~ call.function.arguments | tojson }}
        {%- endfor %}
        {{- m.content ~ eos_token }}
    {%- endif %}
{%- endfor %}"""
"""Mistral's way: tools before the last question, so that each question moves them; ids of nine characters; name and arguments apart."""

NUMBERED = """
{%- for m in messages %}{{ "<|im_start|>" ~ m.role ~ " " ~ loop.index ~ "\\n" ~ m.content ~ "<|im_end|>\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant " ~ (messages | length + 1) ~ "\\n" }}{% endif %}"""
"""Numbers its turns: what it writes depends on how many came before."""

COUNTED = """
{{- messages | length ~ " messages\\n" }}
{%- for m in messages %}{{ "<|im_start|>" ~ m.role ~ "\\n" ~ m.content ~ "<|im_end|>\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""
"""Says at its beginning how long it is: nothing of it can ever be kept."""
