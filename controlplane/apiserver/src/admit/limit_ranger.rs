//! Limit ranges of a namespace: defaults for the containers of new pods, and limits on pods and claims.

use async_trait::async_trait;
use coracle_kinds::{kind::by_resource, limit_range};
use serde_json::Value;

use super::{Admit, Attributes, Operation};
use crate::{
    error::{ApiError, Result},
    server::State,
};

pub(super) struct LimitRanger;

#[async_trait]
impl Admit for LimitRanger {
    async fn mutate(&self, state: &State, attributes: &Attributes<'_>, object: &mut Value) -> Result<()> {
        if attributes.is(Operation::Create, "Pod") {
            for range in ranges(state, attributes.namespace) {
                limit_range::complete(&range, object);
            }
        }
        Ok(())
    }

    async fn validate(&self, state: &State, attributes: &Attributes<'_>, object: &Value) -> Result<()> {
        let claim = attributes.is(Operation::Create, "PersistentVolumeClaim")
            || attributes.is(Operation::Update, "PersistentVolumeClaim");
        if !claim && !attributes.is(Operation::Create, "Pod") {
            return Ok(());
        }
        for range in ranges(state, attributes.namespace) {
            let problems = match claim {
                true => limit_range::check_claim(&range, object),
                false => limit_range::check_pod(&range, object),
            };
            let why = match problems.as_slice() {
                [] => continue,
                [one] => one.clone(),
                all => format!("[{}]", all.join(", ")),
            };
            return Err(ApiError::forbidden_object(attributes.kind, attributes.name, why));
        }
        Ok(())
    }
}

fn ranges(state: &State, namespace: &str) -> Vec<Value> {
    let Some(kind) = by_resource("", "v1", "limitranges") else { return Vec::new() };
    state.cache.list(kind, namespace).iter().map(|range| range.value()).collect()
}
