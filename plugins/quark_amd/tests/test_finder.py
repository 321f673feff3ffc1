"""Names of AMD Quark's public modules that plugins export."""

from __future__ import annotations

import json
from collections.abc import Mapping

from quark.base.lazy import LazyRef, ObjectRef
from quark.config.layer import QLayerConfig
from quark.plugins import Catalog, SchemeRecord, Source, using
from quark_amd import finder
from quark_amd.import_paths import WITH_NAMES_OF_PLUGINS


def exporting(**exports_of: Mapping[str, str]) -> Catalog:
    """Return a catalog of plugins by their exports."""
    catalog = Catalog()
    for name, exports in exports_of.items():
        references = {key: LazyRef(reference) for key, reference in exports.items()}
        record = SchemeRecord(name=name, summary="of a test", config=ObjectRef(QLayerConfig), exports=references)
        catalog.schemes.register(record, Source(f"{name}-quant", "1.0"))
    return catalog


def test_modules_of_plugins_have_their_exports() -> None:
    with using(exporting(acme={"AcmeSpec": "json:dumps", "quark.torch.acme:AcmeThing": "json:loads"})):
        assert finder._modules_of_plugins() == {"quark.torch.acme": {"AcmeThing": LazyRef("json:loads")}}
        assert finder.public_names("quark.torch.acme") == ["AcmeThing"]
        assert finder._of_a_plugin("quark.torch.acme", "AcmeThing") is json.loads
        for module in WITH_NAMES_OF_PLUGINS:
            assert "AcmeSpec" in finder.public_names(module)


def test_a_name_of_a_module_that_two_plugins_export_differently_is_left_out() -> None:
    same, other = {"m:Same": "json:dumps", "m:Spec": "json:dumps"}, {"m:Same": "json:dumps", "m:Spec": "json:loads"}
    with using(exporting(acme=same, zeta=other)):
        assert finder._modules_of_plugins() == {"m": {"Same": LazyRef("json:dumps")}}
