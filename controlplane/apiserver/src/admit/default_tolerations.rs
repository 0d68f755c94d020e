//! Adds the default tolerations: a pod stays on a failed node for five minutes.

use async_trait::async_trait;
use serde_json::{Value, json};

use super::{Admission, Admit, Attributes, Operation};
use crate::error::Result;

const KEYS: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];

pub(super) struct DefaultTolerations;

#[async_trait]
impl Admit for DefaultTolerations {
    async fn mutate(
        &self,
        _admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        // Also on update: a client that sends its original pod would remove them.
        if attributes.is(Operation::Create, "Pod") || attributes.is(Operation::Update, "Pod") {
            add(&mut object["spec"]);
        }
        Ok(())
    }
}

fn add(spec: &mut Value) {
    let Some(spec) = spec.as_object_mut() else { return };
    let Some(list) = spec.entry("tolerations").or_insert_with(|| json!([])).as_array_mut() else { return };
    for key in KEYS {
        let tolerated = list.iter().any(|toleration| {
            let any_key = toleration["key"].as_str().unwrap_or_default().is_empty();
            let any_effect = toleration["effect"].as_str().unwrap_or_default().is_empty();
            (any_key || toleration["key"] == key) && (any_effect || toleration["effect"] == "NoExecute")
        });
        if !tolerated {
            list.push(
                json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tolerations_of_the_pod_stay() {
        let mut spec = json!({"tolerations": [
            {"key": KEYS[0], "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}]});
        add(&mut spec);
        add(&mut spec);
        assert_eq!(spec["tolerations"].as_array().unwrap().len(), 2);
        assert_eq!(spec["tolerations"][0]["tolerationSeconds"], 5);
        let mut all = json!({"tolerations": [{"operator": "Exists"}]});
        add(&mut all);
        assert_eq!(all["tolerations"].as_array().unwrap().len(), 1);
    }
}
