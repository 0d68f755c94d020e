//! The kinds of `admissionregistration.k8s.io`.

use super::{KIND, Kind, PLAIN, RULES, Rules, WITH_GENERATION, Writes, status};
use crate::{defaults, table, validate};

const GROUP: &str = "admissionregistration.k8s.io";

const WEBHOOK_RULES: Rules = Rules {
    defaults: defaults::admission::validating,
    validate: validate::admission::validating,
    unconditional_update: false,
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

pub(super) const VALIDATING_POLICIES: Kind = Kind {
    group: GROUP,
    kind: "ValidatingAdmissionPolicy",
    plural: "validatingadmissionpolicies",
    singular: "validatingadmissionpolicy",
    namespaced: false,
    categories: &["api-extensions"],
    subresources: &[status(GROUP, "ValidatingAdmissionPolicy")],
    schema: "io.k8s.api.admissionregistration.v1.ValidatingAdmissionPolicy",
    rules: Rules {
        defaults: defaults::admission::validating_policy,
        validate: validate::admission_policy::validating,
        unconditional_update: false,
        writes: Writes {
            create: |object| {
                if let Some(map) = object.as_object_mut() {
                    map.remove("status");
                }
            },
            ..WITH_GENERATION
        },
        columns: table::admission::VALIDATING_POLICIES,
        cells: table::admission::validating_policy,
        ..RULES
    },
    ..KIND
};

pub(super) const VALIDATING_BINDINGS: Kind = Kind {
    group: GROUP,
    kind: "ValidatingAdmissionPolicyBinding",
    plural: "validatingadmissionpolicybindings",
    singular: "validatingadmissionpolicybinding",
    namespaced: false,
    categories: &["api-extensions"],
    schema: "io.k8s.api.admissionregistration.v1.ValidatingAdmissionPolicyBinding",
    rules: Rules {
        defaults: defaults::admission::binding,
        validate: validate::admission_policy::validating_binding,
        unconditional_update: false,
        writes: Writes { generation: true, ..PLAIN },
        columns: table::admission::BINDINGS,
        cells: table::admission::binding,
        ..RULES
    },
    ..KIND
};

pub(super) const MUTATING_POLICIES: Kind = Kind {
    group: GROUP,
    kind: "MutatingAdmissionPolicy",
    plural: "mutatingadmissionpolicies",
    singular: "mutatingadmissionpolicy",
    namespaced: false,
    categories: &["api-extensions"],
    schema: "io.k8s.api.admissionregistration.v1.MutatingAdmissionPolicy",
    rules: Rules {
        defaults: defaults::admission::mutating_policy,
        validate: validate::admission_policy::mutating,
        unconditional_update: false,
        writes: Writes { generation: true, ..PLAIN },
        columns: table::admission::MUTATING_POLICIES,
        cells: table::admission::mutating_policy,
        ..RULES
    },
    ..KIND
};

pub(super) const MUTATING_BINDINGS: Kind = Kind {
    group: GROUP,
    kind: "MutatingAdmissionPolicyBinding",
    plural: "mutatingadmissionpolicybindings",
    singular: "mutatingadmissionpolicybinding",
    namespaced: false,
    categories: &["api-extensions"],
    schema: "io.k8s.api.admissionregistration.v1.MutatingAdmissionPolicyBinding",
    rules: Rules {
        defaults: defaults::admission::binding,
        validate: validate::admission_policy::mutating_binding,
        unconditional_update: false,
        writes: Writes { generation: true, ..PLAIN },
        columns: table::admission::BINDINGS,
        cells: table::admission::binding,
        ..RULES
    },
    ..KIND
};
