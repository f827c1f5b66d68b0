"""Entry point `sglang.srt.platforms`: called while any process, spawned ones too, imports SGLang.

It declares no platform of its own (SGLang's base platform serves the CPU); it is the one place early enough to make
`sgl_kernel` importable before SGLang's first use of it.
"""

from verl_mux.platform.choose import cpu_platform_wanted


def activate() -> None:
    """Install the kernel placeholders where the CPU platform is wanted; do nothing anywhere else."""
    if cpu_platform_wanted():
        from verl_mux.platform import kernel_placeholders

        kernel_placeholders.install()
