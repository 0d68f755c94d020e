//! Migrations of stored objects.

use coracle_values::resource;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use serde::Deserialize;

use super::Object;

/// A migration of the stored objects of one resource.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct StorageVersionMigration {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: MigrationSpec,
    pub(crate) status: MigrationStatus,
}

/// The resource of a migration.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct MigrationSpec {
    pub(crate) resource: GroupResource,
}

/// A resource in any version.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(default)]
pub(crate) struct GroupResource {
    pub(crate) group: String,
    pub(crate) resource: String,
}

/// The state of a migration.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct MigrationStatus {
    pub(crate) conditions: Option<Vec<Condition>>,
    /// The resource version of a list at the start of the migration. Later writes need no migration.
    pub(crate) resource_version: String,
}

impl StorageVersionMigration {
    /// Whether the condition of this type is true.
    pub(crate) fn is(&self, type_: &str) -> bool {
        let holds = |condition: &Condition| condition.type_ == type_ && condition.status == "True";
        self.status.conditions.iter().flatten().any(holds)
    }
}

resource!(
    StorageVersionMigration,
    "StorageVersionMigration",
    ("storagemigration.k8s.io", "v1beta1", "storageversionmigrations"),
    ClusterResourceScope
);

impl Object for StorageVersionMigration {}
