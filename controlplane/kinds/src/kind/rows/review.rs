//! Reviews: questions about identities and permissions, which are not stored.

use super::{CREATE, KIND, Kind};

pub(super) const TOKEN_REVIEWS: Kind = Kind {
    singular: "tokenreview",
    ..review(
        "authentication.k8s.io",
        "TokenReview",
        "tokenreviews",
        "io.k8s.api.authentication.v1.TokenReview",
    )
};

pub(super) const SELF_SUBJECT_REVIEWS: Kind = Kind {
    singular: "selfsubjectreview",
    ..review(
        "authentication.k8s.io",
        "SelfSubjectReview",
        "selfsubjectreviews",
        "io.k8s.api.authentication.v1.SelfSubjectReview",
    )
};

pub(super) const SELF_SUBJECT_ACCESS_REVIEWS: Kind = Kind {
    singular: "selfsubjectaccessreview",
    ..review(
        "authorization.k8s.io",
        "SelfSubjectAccessReview",
        "selfsubjectaccessreviews",
        "io.k8s.api.authorization.v1.SelfSubjectAccessReview",
    )
};

pub(super) const SELF_SUBJECT_RULES_REVIEWS: Kind = Kind {
    singular: "selfsubjectrulesreview",
    ..review(
        "authorization.k8s.io",
        "SelfSubjectRulesReview",
        "selfsubjectrulesreviews",
        "io.k8s.api.authorization.v1.SelfSubjectRulesReview",
    )
};

pub(super) const SUBJECT_ACCESS_REVIEWS: Kind = Kind {
    singular: "subjectaccessreview",
    ..review(
        "authorization.k8s.io",
        "SubjectAccessReview",
        "subjectaccessreviews",
        "io.k8s.api.authorization.v1.SubjectAccessReview",
    )
};

pub(super) const LOCAL_SUBJECT_ACCESS_REVIEWS: Kind = Kind {
    singular: "localsubjectaccessreview",
    namespaced: true,
    ..review(
        "authorization.k8s.io",
        "LocalSubjectAccessReview",
        "localsubjectaccessreviews",
        "io.k8s.api.authorization.v1.LocalSubjectAccessReview",
    )
};

/// A kind that is not stored: it supports `create` only.
const fn review(group: &'static str, kind: &'static str, plural: &'static str, schema: &'static str) -> Kind {
    Kind { group, kind, plural, namespaced: false, verbs: CREATE, schema, ..KIND }
}
