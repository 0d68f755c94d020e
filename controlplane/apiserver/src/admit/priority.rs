//! Sets a pod's priority from its priority class. Only the system classes exist; the kind PriorityClass is not served.

use async_trait::async_trait;
use serde_json::Value;

use super::{Admit, Attributes, Operation};
use crate::{
    error::{ApiError, Result},
    server::State,
};

const SYSTEM: [(&str, i64); 2] =
    [("system-cluster-critical", 2_000_000_000), ("system-node-critical", 2_000_001_000)];

pub(super) struct Priority;

#[async_trait]
impl Admit for Priority {
    async fn mutate(&self, _state: &State, attributes: &Attributes<'_>, object: &mut Value) -> Result<()> {
        if !attributes.is(Operation::Create, "Pod") || !object["spec"].is_object() {
            return Ok(());
        }
        let class = object["spec"]["priorityClassName"].as_str().unwrap_or_default();
        let value = match class {
            "" => 0,
            class => {
                SYSTEM.iter().find(|(name, _)| *name == class).map(|(_, value)| *value).ok_or_else(|| {
                    let why = format!("no PriorityClass with name {class} was found");
                    ApiError::forbidden_object(attributes.kind, attributes.name, why)
                })?
            }
        };
        let given = object["spec"]["priority"].as_i64();
        if given.is_some_and(|given| given != value) {
            let why = format!(
                "the integer value of priority ({}) must not be provided in pod spec; \
                 priority admission controller computed {value} from the given PriorityClass name",
                given.unwrap_or_default()
            );
            return Err(ApiError::forbidden_object(attributes.kind, attributes.name, why));
        }
        object["spec"]["priority"] = value.into();
        if object["spec"]["preemptionPolicy"].is_null() {
            object["spec"]["preemptionPolicy"] = "PreemptLowerPriority".into();
        }
        Ok(())
    }
}
