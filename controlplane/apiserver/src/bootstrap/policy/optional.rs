//! Rules about resources that are not served by default.

use coracle_kinds::Resources;

use super::{
    READ,
    Rule::{self, On},
    WRITE,
};

const SCHEDULING: &str = "scheduling.k8s.io";
const MIGRATION: &str = "storagemigration.k8s.io";

/// Rules that are added while a resource is served.
pub(super) struct Optional {
    /// Group, version and name of the resource.
    resource: (&'static str, &'static str, &'static str),
    /// Additional rules of cluster roles.
    pub(super) roles: &'static [(&'static str, &'static [Rule])],
    /// Roles of controllers.
    pub(super) controllers: &'static [(&'static str, &'static [Rule])],
}

// === impl Optional ===

impl Optional {
    pub(super) fn is_served(&self, served: &Resources) -> bool {
        let (group, version, plural) = self.resource;
        served.find(group, version, plural).is_some()
    }
}

pub(super) const OPTIONAL: &[Optional] = &[
    Optional {
        resource: (SCHEDULING, "v1alpha2", "podgroups"),
        roles: &[
            ("system:aggregate-to-edit", &[On(SCHEDULING, "podgroups workloads", WRITE)]),
            ("system:aggregate-to-view", &[On(SCHEDULING, "podgroups podgroups/status workloads", READ)]),
            (
                "system:kube-scheduler",
                &[On(SCHEDULING, "podgroups", READ), On(SCHEDULING, "podgroups/status", "patch update")],
            ),
        ],
        controllers: &[(
            "podgroup-protection-controller",
            &[On(SCHEDULING, "podgroups", "get list update watch"), On("", "pods", READ)],
        )],
    },
    Optional {
        resource: (MIGRATION, "v1beta1", "storageversionmigrations"),
        roles: &[],
        controllers: &[(
            "storage-version-migrator-controller",
            &[
                // `create` is for a server-side apply of an object that was deleted meanwhile. The uid makes this
                // creation fail.
                On("*", "*", "create list patch"),
                On("apiextensions.k8s.io", "customresourcedefinitions", "get"),
                On("apiextensions.k8s.io", "customresourcedefinitions/status", "patch"),
                On(MIGRATION, "storageversionmigrations/status", "update"),
            ],
        )],
    },
];
