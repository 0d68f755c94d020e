//! The kind of `apiextensions.k8s.io`.

use coracle_custom_resources::definition_defaults;

use super::{KIND, Kind, RULES, Rules, WITH_GENERATION, Writes, status};
use crate::validate;

const GROUP: &str = "apiextensions.k8s.io";

pub(super) const CUSTOM_RESOURCE_DEFINITIONS: Kind = Kind {
    group: GROUP,
    kind: "CustomResourceDefinition",
    plural: "customresourcedefinitions",
    singular: "customresourcedefinition",
    short_names: &["crd", "crds"],
    categories: &["api-extensions"],
    namespaced: false,
    subresources: &[status(GROUP, "CustomResourceDefinition")],
    schema: "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.CustomResourceDefinition",
    rules: Rules {
        defaults: definition_defaults::set,
        validate: validate::extension::definition,
        unconditional_update: false,
        writes: Writes {
            create: |object| {
                if let Some(map) = object.as_object_mut() {
                    map.remove("status");
                }
                definition_defaults::record_storage_version(object);
            },
            update: definition_defaults::record_storage_version,
            ..WITH_GENERATION
        },
        ..RULES
    },
    ..KIND
};
