"""What tests of an attention backend need, for backends inside and outside this package.

Someone who writes a backend starts with :mod:`attn.testing.conformance`:

    from attn.testing.cases import cases_for
    from attn.testing.conformance import check_case

    @pytest.mark.parametrize("case", cases_for(MyBackend), ids=str)
    def test_conformance(case):
        check_case(MyBackend, case, "cuda")

A backend whose Triton kernels are to run in Triton's interpreter (``TRITON_INTERPRET=1``) must be
registered by :func:`attn.registry.register_backend`.

The parts, each of which serves on its own too:

- ``oracle``: attention by definition, in float64; the judge of every result.
- ``budget``: how wrong a result may be, computed from the data, and inputs on which faults show.
- ``stored_rows``: what the bytes of a cache mean; the judge of every cache write.
- ``batches``: named batches, their tensors, and a cache that punishes every wrong read.
- ``cases``: what a layer may ask, and which cases a backend is put through.
- ``trial``, ``dense_trial``, ``latent_trial``: one case set up, run and judged.
- ``conformance``: the runner, and the list of what it checks.
- ``habits``: which known kernels round more than a careful one.

Nothing that runs a model imports this package. It needs torch and no test framework.
"""
