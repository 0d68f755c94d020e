//! The kinds of `admissionregistration.k8s.io`.

use super::{KIND, Kind, PLAIN, RULES, Rules, Writes};
use crate::{defaults, table, validate};

const GROUP: &str = "admissionregistration.k8s.io";

const WEBHOOK_RULES: Rules = Rules {
    defaults: defaults::admission::validating,
    validate: validate::admission::validating,
    writes: Writes { generation: true, ..PLAIN },
    columns: table::admission::WEBHOOKS,
    cells: table::admission::webhooks,
    ..RULES
};

pub(super) const MUTATING_WEBHOOKS: Kind = Kind {
    group: GROUP,
    kind: "MutatingWebhookConfiguration",
    plural: "mutatingwebhookconfigurations",
    singular: "mutatingwebhookconfiguration",
    namespaced: false,
    categories: &["api-extensions"],
    schema: "io.k8s.api.admissionregistration.v1.MutatingWebhookConfiguration",
    rules: Rules {
        defaults: defaults::admission::mutating,
        validate: validate::admission::mutating,
        ..WEBHOOK_RULES
    },
    ..KIND
};

pub(super) const VALIDATING_WEBHOOKS: Kind = Kind {
    group: GROUP,
    kind: "ValidatingWebhookConfiguration",
    plural: "validatingwebhookconfigurations",
    singular: "validatingwebhookconfiguration",
    namespaced: false,
    categories: &["api-extensions"],
    schema: "io.k8s.api.admissionregistration.v1.ValidatingWebhookConfiguration",
    rules: WEBHOOK_RULES,
    ..KIND
};
