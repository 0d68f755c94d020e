//! Adds a toleration to pods that request an extended resource. So nodes with special hardware can have a taint with
//! the name of the resource. The taint prevents that other pods are scheduled to these nodes.
//!
//! Source: `plugin/pkg/admission/extendedresourcetoleration`.

use std::collections::BTreeSet;

use async_trait::async_trait;
use serde_json::{Value, json};

use super::{containers, writes_pod};
use crate::{
    admit::{Admission, Admit, Attributes},
    error::Result,
};

pub(in crate::admit) struct ExtendedResourceToleration;

#[async_trait]
impl Admit for ExtendedResourceToleration {
    async fn mutate(
        &self,
        _admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        if writes_pod(attributes) {
            add(object);
        }
        Ok(())
    }
}

fn add(pod: &mut Value) {
    let keys: BTreeSet<String> = containers(&pod["spec"])
        .filter_map(|container| container.value["resources"]["requests"].as_object())
        .flat_map(|requests| requests.keys().filter(|name| is_extended(name)).cloned())
        .collect();
    let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut).filter(|_| !keys.is_empty()) else {
        return;
    };
    let Some(list) = spec.entry("tolerations").or_insert_with(|| json!([])).as_array_mut() else { return };
    for key in keys {
        let wanted = json!({"key": key, "operator": "Exists", "effect": "NoSchedule"});
        if !list.contains(&wanted) {
            list.push(wanted);
        }
    }
}

/// Whether a resource belongs to a vendor, for example `example.com/gpu`. False for resources of Kubernetes' own
/// domain, and for quota names.
fn is_extended(name: &str) -> bool {
    let domain = name.split_once('/').map(|(domain, _)| domain);
    let own = |domain: &str| domain == "kubernetes.io" || domain.ends_with(".kubernetes.io");
    domain.is_some_and(|domain| !own(domain)) && !name.starts_with("requests.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_extended_resource_is_tolerated_once() {
        let container =
            json!({"resources": {"requests": {"cpu": "1", "example.com/gpu": "1", "kubernetes.io/x": "1"}}});
        let mut pod = json!({"spec": {"containers": [container, container]}});
        add(&mut pod);
        add(&mut pod);
        let expected = json!([{"key": "example.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]);
        assert_eq!(pod["spec"]["tolerations"], expected);
        let mut plain = json!({"spec": {"containers": [{}]}});
        add(&mut plain);
        assert!(plain["spec"]["tolerations"].is_null());
    }
}
