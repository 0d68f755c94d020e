//! One authenticated and authorized request for a resource.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use coracle_admission_policies::RequestCost;
use coracle_kinds::{
    Resource,
    schema::FieldValidation,
    validate::{Causes, Path},
};
use http::HeaderMap;

use crate::{
    audit::Record,
    authn::User,
    error::{ApiError, Result},
    media::{self, Form},
    offload::MIN_OFFLOADED_BYTES,
    request::{RequestInfo, ResourceInfo},
    server::State,
};

pub(crate) struct Call {
    pub(crate) state: Arc<State>,
    pub(crate) user: User,
    pub(crate) info: RequestInfo,
    pub(crate) resource: ResourceInfo,
    pub(crate) kind: Arc<Resource>,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) warnings: Warnings,
    /// The cost of the expressions of admission policies.
    pub(crate) cost: RequestCost,
    /// The audit record, if the request is recorded.
    pub(crate) audit: Option<Arc<Record>>,
}

/// Maximum number of warnings of one request. [`crate::reply::warned`] limits their bytes.
const MAX_WARNINGS: usize = 100;

/// Warnings for the client that admission collects, each once. More than the maximum are dropped.
#[derive(Default)]
pub(crate) struct Warnings(Mutex<Vec<String>>);

// === impl Warnings ===

impl Warnings {
    /// The warning that the version is deprecated, if it is.
    pub(crate) fn about(kind: &Resource) -> Self {
        Self(Mutex::new(kind.deprecation.iter().map(|text| text.clone().into_owned()).collect()))
    }

    pub(crate) fn add(&self, text: String) {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if list.len() < MAX_WARNINGS && !list.contains(&text) {
            list.push(text);
        }
    }

    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

// === impl Call ===

impl Call {
    /// Whether work on the body should not run on the async workers.
    pub(crate) fn has_large_body(&self) -> bool {
        self.body.len() > MIN_OFFLOADED_BYTES
    }

    /// The form of the response that the client prefers.
    pub(crate) fn form(&self) -> Result<Form> {
        let forms = ["Table", "PartialObjectMetadata", "PartialObjectMetadataList"];
        media::negotiate(&self.headers, &self.info.query, &forms)
    }

    pub(crate) fn dry_run(&self) -> Result<bool> {
        let values = self.info.query.all("dryRun");
        if values.iter().any(|value| value != "All") {
            return Err(self.invalid_parameter(|causes| {
                causes.unsupported(&Path::root("dryRun"), &serde_json::json!(values), &["All"]);
            }));
        }
        Ok(!values.is_empty())
    }

    pub(crate) fn validation(&self) -> Result<FieldValidation> {
        match self.info.query.get("fieldValidation") {
            "" | "Warn" => Ok(FieldValidation::Warn),
            "Ignore" => Ok(FieldValidation::Ignore),
            "Strict" => Ok(FieldValidation::Strict),
            other => Err(self.invalid_parameter(|causes| {
                let known = &["", "Ignore", "Strict", "Warn"];
                causes.unsupported(&Path::root("fieldValidation"), &other.into(), known);
            })),
        }
    }

    /// The error of an invalid parameter of the request. `describe` adds its causes.
    pub(crate) fn invalid_parameter(&self, describe: impl FnOnce(&mut Causes)) -> ApiError {
        let options = match self.info.verb {
            "create" => "CreateOptions",
            "update" => "UpdateOptions",
            "patch" => "PatchOptions",
            "delete" | "deletecollection" => "DeleteOptions",
            _ => "ListOptions",
        };
        let mut causes = Causes::default();
        describe(&mut causes);
        ApiError::invalid_parameters((options, "meta.k8s.io"), &causes.into_list())
    }

    /// The namespace of this kind's keys.
    pub(crate) fn namespace(&self) -> &str {
        if self.kind.namespaced { &self.resource.namespace } else { "" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_distinct_and_limited() {
        let warnings = Warnings::default();
        for number in 0..10_000 {
            warnings.add(format!("{}", number / 2));
        }
        let all = warnings.take();
        assert_eq!((all.len(), all[1].as_str()), (MAX_WARNINGS, "1"));
    }
}
