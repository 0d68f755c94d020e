//! GET of component statuses: whether scheduler, controllers and store are healthy. The kind is deprecated and not
//! stored, but clients still read it.
//!
//! A component of this process is healthy while the process runs. Another component is healthy while it renews its
//! lease: this server has no credentials for its health check. Source: `pkg/registry/core/componentstatus`.

use coracle_kinds::kind::by_resource;
use coracle_store::Health;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use crate::{
    call::Call,
    error::{ApiError, Result},
    media::Form,
    reply::{self, Reply},
    state::State,
    verb::list,
};

/// Names of components, each with the name of its lease in `kube-system`.
const COMPONENTS: [(&str, &str); 2] =
    [("controller-manager", "kube-controller-manager"), ("scheduler", "kube-scheduler")];
const STORE: &str = "etcd-0";
const SPEC: [&[&str]; 2] = [&["spec", "renewTime"], &["spec", "leaseDurationSeconds"]];

/// `Ok` if a component is healthy, otherwise the reason.
type Condition = std::result::Result<(), String>;

pub(crate) fn run(call: &Call) -> Result<Reply> {
    let form = call.form()?;
    if call.info.verb == "list" {
        let scope = list::scope(call)?;
        let mut found = all(&call.state);
        found.retain(|object| scope.labels.matches_object(object) && scope.fields.matches(object));
        if let Form::Table(content) = form {
            let table = reply::table_of(&call.kind, &found, json!({}), reply::options(content));
            return Ok(reply::json(200, &table));
        }
        return Ok(reply::json(200, &list_of(call, found)));
    }
    let name = &call.resource.name;
    let found = all(&call.state).into_iter().find(|object| object["metadata"]["name"] == *name);
    let found = found.ok_or_else(|| ApiError::unknown_component(name))?;
    Ok(match form {
        Form::Table(content) => {
            reply::json(200, &reply::table_of(&call.kind, [&found], json!({}), reply::options(content)))
        }
        Form::Partial(version) | Form::PartialProtobuf(version) => {
            reply::json(200, &coracle_kinds::table::partial_metadata(&found, version))
        }
        _ => reply::json(200, &found),
    })
}

/// The list. Its items omit apiVersion and kind, as in every list.
fn list_of(call: &Call, mut items: Vec<Value>) -> Value {
    for item in items.iter_mut().filter_map(Value::as_object_mut) {
        item.remove("apiVersion");
        item.remove("kind");
    }
    json!({"kind": call.kind.list_kind, "apiVersion": "v1", "metadata": {}, "items": items})
}

fn all(state: &State) -> Vec<Value> {
    let now = Timestamp::now();
    let mut all: Vec<Value> = COMPONENTS
        .iter()
        .map(|(name, lease)| {
            let is_own = state.own_components.contains(name);
            status(name, &if is_own { Ok(()) } else { lease_condition(state, lease, now) })
        })
        .collect();
    all.push(status(STORE, &store_condition(state.store.health())));
    all
}

fn status(name: &str, condition: &Condition) -> Value {
    let (healthy, message) = match condition {
        Ok(()) => ("True", "ok"),
        Err(why) => ("False", why.as_str()),
    };
    let condition = json!({"type": "Healthy", "status": healthy, "message": message});
    json!({"kind": "ComponentStatus", "apiVersion": "v1", "metadata": {"name": name}, "conditions": [condition]})
}

fn store_condition(health: Health) -> Condition {
    match health {
        Health::Good => Ok(()),
        Health::Full { free } => Err(format!("database space exceeded: {} MiB free", free >> 20)),
        // The detail may contain paths of this machine.
        Health::Failed(_detail) => Err("the store failed; the log of the API server says why".to_owned()),
    }
}

fn lease_condition(state: &State, name: &str, now: Timestamp) -> Condition {
    let lease = by_resource("coordination.k8s.io", "v1", "leases")
        .and_then(|kind| state.cache.get(kind, "kube-system", name));
    match lease {
        Some(lease) => renewed(&lease.part(&SPEC), now),
        None => Err(format!("no lease kube-system/{name}: not started, or started without leader election")),
    }
}

/// `Ok` if the holder of a lease renewed it within its duration.
fn renewed(lease: &Value, now: Timestamp) -> Condition {
    let spec = &lease["spec"];
    let time: Option<Timestamp> = spec["renewTime"].as_str().and_then(|time| time.parse().ok());
    let Some(time) = time else { return Err("the lease has no holder".to_owned()) };
    let seconds = spec["leaseDurationSeconds"].as_i64().unwrap_or(0);
    if now.duration_since(time) > SignedDuration::from_secs(seconds) {
        return Err(format!("the lease was not renewed since {time}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_component_works_while_it_renews_its_lease() {
        let now: Timestamp = "2026-01-01T00:00:20Z".parse().unwrap();
        let lease = |time: &str| json!({"spec": {"renewTime": time, "leaseDurationSeconds": 15}});
        assert_eq!(renewed(&lease("2026-01-01T00:00:05.000000Z"), now), Ok(()));
        let late = renewed(&lease("2026-01-01T00:00:04Z"), now);
        assert_eq!(late, Err("the lease was not renewed since 2026-01-01T00:00:04Z".to_owned()));
        assert!(renewed(&json!({"spec": {"holderIdentity": ""}}), now).is_err());
        assert!(renewed(&lease("never"), now).is_err());
    }
}
