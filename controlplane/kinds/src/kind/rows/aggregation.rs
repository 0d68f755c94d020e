//! The kind APIService of `apiregistration.k8s.io`: a group version and the server that serves it.

use super::{KIND, Kind, NameRule, Rules, WITH_STATUS, Writes, status};
use crate::{defaults, table, validate};

const GROUP: &str = "apiregistration.k8s.io";

pub(super) const API_SERVICES: Kind = Kind {
    group: GROUP,
    kind: "APIService",
    plural: "apiservices",
    singular: "apiservice",
    categories: &["api-extensions"],
    namespaced: false,
    subresources: &[status(GROUP, "APIService")],
    schema: "io.k8s.kube-aggregator.pkg.apis.apiregistration.v1.APIService",
    rules: Rules {
        defaults: defaults::aggregation::api_service,
        validate: validate::aggregation::api_service,
        name: NameRule::PathSegment,
        unconditional_update: false,
        create_on_update: false,
        writes: Writes { create: validate::aggregation::new_status, ..WITH_STATUS },
        columns: table::aggregation::API_SERVICE,
        cells: table::aggregation::api_service,
    },
    ..KIND
};
