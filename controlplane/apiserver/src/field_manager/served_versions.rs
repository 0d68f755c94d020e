//! The served versions of a resource. Managers may own fields in each of them.

use std::{
    borrow::Cow,
    sync::{Arc, LazyLock},
};

use arc_swap::Guard;
use coracle_kinds::{Resource, Resources};
use coracle_managed_fields::{Schema, TypeId, Versions};
use serde_json::Value;

use crate::convert;

/// The schema of a resource without a schema: it is empty.
static UNKNOWN: LazyLock<Schema> = LazyLock::new(Schema::default);

/// The served versions of the resource of a request.
pub(super) struct ServedVersions<'a> {
    /// The version of the request.
    own: &'a Resource,
    /// All served resources.
    set: Guard<Arc<Resources>>,
}

// === impl ServedVersions ===

impl<'a> ServedVersions<'a> {
    pub(super) fn new(own: &'a Resource, set: Guard<Arc<Resources>>) -> Self {
        Self { own, set }
    }

    /// A version of the resource. `None` if it is not served.
    fn find(&self, api_version: &str) -> Option<&Resource> {
        if api_version == self.own.api_version() {
            return Some(self.own);
        }
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        let found = self.set.find(group, version, &self.own.plural)?;
        // The stored version identifies the resource, because events have versions in two groups.
        let (stored, own) = (found.stored_as(), self.own.stored_as());
        (stored.group == own.group && stored.plural == own.plural).then_some(&**found)
    }
}

impl Versions for ServedVersions<'_> {
    fn schema(&self, api_version: &str) -> Option<(&Schema, TypeId)> {
        let known = self.find(api_version)?.strategy().ownership();
        Some(known.unwrap_or_else(|| (&*UNKNOWN, Schema::deduced())))
    }

    fn convert<'a>(&self, object: &'a Value, api_version: &str) -> Option<Cow<'a, Value>> {
        let present = object["apiVersion"].as_str().unwrap_or_else(|| self.own.api_version());
        if present == api_version {
            return Some(Cow::Borrowed(object));
        }
        let (from, to) = (self.find(present)?, self.find(api_version)?);
        convert::immediately(from, to, object.clone()).map(Cow::Owned)
    }

    fn all_convert(&self) -> bool {
        let served = self.set.served_versions(self.own);
        served.len() < 2 || !served.iter().any(|version| convert::calls_webhook(version))
    }
}
