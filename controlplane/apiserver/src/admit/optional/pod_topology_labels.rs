//! Copies the zone and the region of a node to its pods. A pod gets these labels when it is bound. A pod that names its
//! node gets them when it is created.
//!
//! Source: `plugin/pkg/admission/podtopologylabels`.

use async_trait::async_trait;
use coracle_kinds::kind::by_resource;
use coracle_values::CollectMap;
use serde_json::{Map, Value, json};

use crate::{
    admit::{Admission, Admit, Attributes, Operation},
    cache::Cache,
    error::Result,
};

const LABELS: [&str; 2] = ["topology.kubernetes.io/zone", "topology.kubernetes.io/region"];

pub(in crate::admit) struct PodTopologyLabels;

#[async_trait]
impl Admit for PodTopologyLabels {
    async fn mutate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        let creates = attributes.operation == Operation::Create && attributes.kind.is("", "Pod");
        if !creates && !attributes.writes_new_pod() {
            return Ok(());
        }
        let Some(node) = node_name(attributes.subresource, object) else { return Ok(()) };
        let copied = labels_of(&admission.cache, node);
        add(object, copied);
        Ok(())
    }

    /// The labels of a binding are copied to its pod.
    fn handles_own_objects(&self) -> bool {
        true
    }
}

/// The node in a pod or a binding, if there is one.
fn node_name<'a>(subresource: &str, object: &'a Value) -> Option<&'a str> {
    let name = match subresource {
        "" => &object["spec"]["nodeName"],
        "binding" if object["target"]["kind"] == "Node" => &object["target"]["name"],
        _ => return None,
    };
    name.as_str().filter(|name| !name.is_empty())
}

/// The topology labels of a node. Empty for a missing node. Each state of a node is parsed at most once, because the
/// node's list of images can be long.
fn labels_of(cache: &Cache, node: &str) -> Map<String, Value> {
    let Some(kind) = by_resource("", "v1", "nodes") else { return Map::new() };
    let Some(node) = cache.get(kind, "", node) else { return Map::new() };
    let attributes = node.selector_attributes(kind);
    let label = |key: &str| Some((key.to_owned(), Value::from(attributes.label(key)?)));
    LABELS.into_iter().filter_map(label).collect_map()
}

/// Adds labels to an object. The labels replace the client's values.
fn add(object: &mut Value, labels: Map<String, Value>) {
    if labels.is_empty() {
        return;
    }
    let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else { return };
    let own = metadata.entry("labels").or_insert_with(|| json!({}));
    match own {
        Value::Object(own) => own.extend(labels),
        other => *other = Value::Object(labels),
    }
}

#[cfg(test)]
mod tests {
    use coracle_store::Commit;

    use super::*;
    use crate::cache::{encode, key_of, parses};

    #[test]
    fn the_labels_of_a_node_are_parsed_once() {
        let (cache, kind) = (Cache::new(1), by_resource("", "v1", "nodes").unwrap());
        let node = json!({"metadata": {"name": "n", "labels": {LABELS[0]: "a", "other": "b"}}});
        cache.apply(&Commit {
            key: key_of(kind, "", "n").into(),
            revision: 2,
            value: Some(encode(kind, &node)),
            created: 2,
            guard_follows: false,
        });
        let expect = Map::from_iter([(LABELS[0].to_owned(), "a".into())]);
        let before = parses::so_far();
        assert_eq!((labels_of(&cache, "n"), labels_of(&cache, "n")), (expect.clone(), expect));
        assert_eq!(parses::so_far() - before, 1);
        assert!(labels_of(&cache, "absent").is_empty());
    }

    #[test]
    fn a_pod_and_a_binding_have_a_node() {
        let pod = json!({"spec": {"nodeName": "n"}});
        assert_eq!((node_name("", &pod), node_name("status", &pod)), (Some("n"), None));
        assert_eq!(node_name("", &json!({"spec": {}})), None);
        let binding = |kind: &str| json!({"target": {"kind": kind, "name": "n"}});
        assert_eq!(node_name("binding", &binding("Node")), Some("n"));
        assert_eq!(node_name("binding", &binding("Other")), None);
    }

    #[test]
    fn the_labels_of_the_node_replace_those_of_the_client() {
        let zone = || Map::from_iter([(LABELS[0].to_owned(), "a".into())]);
        let mut pod = json!({"metadata": {"labels": {LABELS[0]: "b", "app": "x"}}});
        add(&mut pod, zone());
        assert_eq!(pod["metadata"]["labels"], json!({LABELS[0]: "a", "app": "x"}));
        let mut plain = json!({"metadata": {"name": "p"}});
        add(&mut plain, Map::new());
        assert_eq!(plain, json!({"metadata": {"name": "p"}}));
        add(&mut plain, zone());
        assert_eq!(plain["metadata"]["labels"], json!({LABELS[0]: "a"}));
    }
}
