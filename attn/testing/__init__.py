"""What tests of an attention backend need, for backends inside and outside this package.

Someone who writes a backend starts with the pytest plugin, :mod:`attn.testing.plugin`. In
``conftest.py``, then in a test:

    pytest_plugins = "attn.testing.plugin"

    @pytest.mark.attn_backend("MY_ATTN")
    def test_conformance(attn_case):
        attn_case.check()

Without pytest, :mod:`attn.testing.conformance` does the same for a backend class:

    for case in attn.testing.cases.cases_for(MyBackend):
        attn.testing.conformance.check_case(MyBackend, case, "cuda")

A backend whose Triton kernels are to run in Triton's interpreter (``TRITON_INTERPRET=1``) must be
registered: by an entry point of its package or by :func:`attn.registry.register_backend`.

The parts, each of which serves on its own too:

- ``oracle``: attention by definition, in float64; the judge of every result.
- ``budget``: how wrong a result may be, computed from the data, and inputs on which faults show.
- ``stored_rows``: what the bytes of a cache mean; the judge of every cache write.
- ``batches``: named batches, their tensors, and a cache that punishes every wrong read.
- ``cases``: what a layer may ask, and which cases a backend is put through.
- ``trial``, ``dense_trial``, ``latent_trial``: one case set up, run and judged.
- ``conformance``: the runner, and the list of what it checks.
- ``habits``: which known kernels round more than a careful one.
- ``plugin``, ``kit``: the runner as a pytest plugin and a test.

Nothing that runs a model imports this package. It needs torch; only ``plugin`` needs pytest.
"""
