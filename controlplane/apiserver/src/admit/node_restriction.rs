//! A node writes only about itself and about the pods that are bound to it.

use serde_json::Value;

use super::{Admit, Attributes, Operation};
use crate::{
    error::{ApiError, Result},
    server::State,
};

pub(super) struct NodeRestriction;

impl Admit for NodeRestriction {
    fn validate(&self, _state: &State, attributes: &Attributes<'_>, object: &Value) -> Result<()> {
        let Some(node) = attributes.user.node() else { return Ok(()) };
        let refused = match attributes.kind.kind {
            "Node" if attributes.name != node => {
                format!("node \"{node}\" is not allowed to modify node \"{}\"", attributes.name)
            }
            "Pod" => match pod(node, attributes, object) {
                Ok(()) => return Ok(()),
                Err(why) => why,
            },
            _ => return Ok(()),
        };
        Err(ApiError::forbidden_object(attributes.kind, attributes.name, refused))
    }
}

fn pod(node: &str, attributes: &Attributes<'_>, object: &Value) -> std::result::Result<(), String> {
    let bound = attributes.old.unwrap_or(object)["spec"]["nodeName"] == node;
    if !bound {
        return Err(format!("node \"{node}\" can only touch pods with spec.nodeName set to itself"));
    }
    let mirror = object["metadata"]["annotations"]["kubernetes.io/config.mirror"].is_string();
    if attributes.operation == Operation::Create && !mirror {
        return Err(format!(
            "pod does not have \"kubernetes.io/config.mirror\" annotation, node \"{node}\" can only create mirror pods"
        ));
    }
    Ok(())
}
