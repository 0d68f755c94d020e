//! The controllers of a budget's pods, and their scales.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::autoscaling::v2::CrossVersionObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use tokio::time::Instant;

use super::plan::{Controller, SelectedPod};
use crate::context::Context;
use crate::object::{Key, ObjectExt, Pod, controller_of};
use crate::scale_target::Target;

/// Maximum number of controllers whose scale is read from the API server in one reconcile of a budget. Anyone who may
/// create pods can name any controller in them.
const MAX_READS: usize = 5;
/// Maximum time of all reads in one reconcile of a budget. The budgets of all namespaces share one worker, and the
/// server of a kind may not respond.
const READ_TIME: Duration = Duration::from_secs(10);

/// Finds the controllers of the pods of one namespace. Controllers of other kinds than those in the caches are read
/// from the API server.
pub(super) struct Controllers<'a> {
    context: &'a Context,
    namespace: &'a str,
    /// The controllers that have been read, by the UID in the reference of a pod.
    read: HashMap<String, Controller>,
    /// The end of [`READ_TIME`].
    deadline: Instant,
}

impl<'a> Controllers<'a> {
    pub(super) fn new(context: &'a Context, namespace: &'a str) -> Self {
        Self { context, namespace, read: HashMap::new(), deadline: Instant::now() + READ_TIME }
    }

    /// Adds their controllers to pods.
    pub(super) async fn of(mut self, pods: Vec<Arc<Pod>>) -> Vec<SelectedPod> {
        let mut selected = Vec::with_capacity(pods.len());
        for pod in pods {
            let controller = match controller_of(&pod.metadata) {
                None => Controller::None,
                Some(owner) => self.find(owner).await,
            };
            selected.push(SelectedPod { pod, controller });
        }
        selected
    }

    async fn find(&mut self, owner: &OwnerReference) -> Controller {
        if let Some(known) = self.cached(owner) {
            return known;
        }
        if let Some(known) = self.read.get(&owner.uid) {
            return known.clone();
        }
        if self.read.len() >= MAX_READS {
            let why = format!("the pods have more than {MAX_READS} controllers of kinds without a cache");
            return Controller::Failed(why);
        }
        let late =
            || Controller::Failed("the scales of the pods' controllers are not read in time".to_owned());
        let read = tokio::time::timeout_at(self.deadline, self.read(owner)).await;
        let read = read.unwrap_or_else(|_elapsed| late());
        self.read.insert(owner.uid.clone(), read.clone());
        read
    }

    /// A controller from the caches: a replication controller, a stateful set, a replica set, or the deployment that
    /// controls the replica set. `None` if no cache has it.
    fn cached(&self, owner: &OwnerReference) -> Option<Controller> {
        let caches = &self.context.caches;
        let key = Key::new(self.namespace, &owner.name);
        let group = owner.api_version.split_once('/').map_or("", |(group, _)| group);
        match (group, owner.kind.as_str()) {
            ("", "ReplicationController") => {
                let found = caches.replication_controllers.get(&key)?;
                known(owner, found.uid(), found.spec.replicas)
            }
            ("apps", "StatefulSet") => {
                let found = caches.stateful_sets.get(&key)?;
                known(owner, found.uid(), found.spec.replicas)
            }
            ("apps", "ReplicaSet") => {
                let set = caches.replica_sets.get(&key)?;
                let above = controller_of(&set.metadata).filter(|above| above.kind == "Deployment");
                let deployment = above.and_then(|above| {
                    let found = caches.deployments.get(&Key::new(self.namespace, &above.name))?;
                    (set.uid() == owner.uid).then_some(())?;
                    known(above, found.uid(), found.spec.replicas)
                });
                deployment.or_else(|| known(owner, set.uid(), set.spec.replicas))
            }
            _ => None,
        }
    }

    /// A controller from the API server, by the subresource `scale` of its kind.
    async fn read(&self, owner: &OwnerReference) -> Controller {
        let target = CrossVersionObjectReference {
            api_version: Some(owner.api_version.clone()),
            kind: owner.kind.clone(),
            name: owner.name.clone(),
        };
        let target = match Target::find(&self.context.client, self.namespace, &target).await {
            Ok(target) => target,
            Err(why) => return Controller::Failed(why),
        };
        match target.scale_if_found().await {
            Ok(Some(scale)) => {
                let uid = scale.metadata.uid.unwrap_or_default();
                let replicas = scale.spec.and_then(|spec| spec.replicas).unwrap_or(0);
                known(owner, &uid, Some(replicas)).unwrap_or(Controller::Unknown)
            }
            Ok(None) => Controller::Unknown,
            Err(why) => Controller::Failed(why),
        }
    }
}

/// A controller with its scale. `None` if it is not the object of the reference, but a later object of this name.
fn known(reference: &OwnerReference, uid: &str, replicas: Option<i32>) -> Option<Controller> {
    (uid == reference.uid).then(|| Controller::Known { uid: uid.to_owned(), scale: replicas.unwrap_or(1) })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::config::ControllersConfig;
    use crate::test_api::TestApi;

    fn pod(name: &str, owner: Option<(&str, &str, &str)>) -> Arc<Pod> {
        let owners: Vec<Value> = owner
            .into_iter()
            .map(|(version, kind, name)| {
                json!({"apiVersion": version, "kind": kind, "name": name, "uid": format!("uid-{name}"),
                    "controller": true})
            })
            .collect();
        let metadata = json!({"name": name, "namespace": "n", "ownerReferences": owners});
        Arc::new(serde_json::from_value(json!({"metadata": metadata})).unwrap())
    }

    fn scale(name: &str, uid: &str, replicas: i32) -> Value {
        json!({"kind": "Scale", "apiVersion": "autoscaling/v1", "spec": {"replicas": replicas},
            "metadata": {"name": name, "namespace": "n", "uid": uid}})
    }

    fn resources(version: &str, kind: &str, plural: &str) -> Value {
        let resource = json!({"name": plural, "singularName": "", "namespaced": true, "kind": kind,
            "verbs": ["get"]});
        json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": [resource]})
    }

    async fn found(api: &TestApi, pods: Vec<Arc<Pod>>) -> Vec<Controller> {
        let selected = Controllers::new(&api.context, "n").of(pods).await;
        selected.into_iter().map(|one| one.controller).collect()
    }

    fn known(name: &str, scale: i32) -> Controller {
        Controller::Known { uid: format!("uid-{name}"), scale }
    }

    #[tokio::test]
    async fn workloads_of_the_caches_need_no_request() {
        let api = TestApi::new(&[]);
        let caches = &api.context.caches;
        let object = |name: &str, replicas: i32| {
            json!({"metadata": {"name": name, "namespace": "n", "uid": format!("uid-{name}"),
                "resourceVersion": "1"},
                "spec": {"replicas": replicas, "selector": {}, "template": {}, "serviceName": ""}})
        };
        caches.stateful_sets.written(serde_json::from_value(object("db", 3)).unwrap());
        caches.replication_controllers.written(serde_json::from_value(object("old", 2)).unwrap());
        let mut set = object("web-1", 1);
        set["metadata"]["ownerReferences"] = json!([{"apiVersion": "apps/v1", "kind": "Deployment", "name": "web",
            "uid": "uid-web", "controller": true}]);
        caches.replica_sets.written(serde_json::from_value(set).unwrap());
        caches.deployments.written(serde_json::from_value(object("web", 4)).unwrap());
        let pods = vec![
            pod("a", None),
            pod("b", Some(("apps/v1", "StatefulSet", "db"))),
            pod("c", Some(("v1", "ReplicationController", "old"))),
            pod("d", Some(("apps/v1", "ReplicaSet", "web-1"))),
        ];
        let expected = [Controller::None, known("db", 3), known("old", 2), known("web", 4)];
        assert_eq!(found(&api, pods).await, expected);
    }

    #[tokio::test]
    async fn other_controllers_are_read_by_their_scale() {
        let api = TestApi::new(&[
            ("/apis/db.io/v1", resources("db.io/v1", "Database", "databases")),
            ("/apis/db.io/v1/namespaces/n/databases/a/scale", scale("a", "uid-a", 5)),
            ("/apis/db.io/v1/namespaces/n/databases/b/scale", scale("b", "uid of a later object", 5)),
            ("/apis/batch/v1", resources("batch/v1", "Job", "jobs")),
        ]);
        let database = |name| Some(("db.io/v1", "Database", name));
        let pods = vec![pod("1", database("a")), pod("2", database("a")), pod("3", database("b"))];
        assert_eq!(found(&api, pods).await, [known("a", 5), known("a", 5), Controller::Unknown]);
        let without_scale = "jobs.batch does not implement the scale subresource".to_owned();
        let pods = vec![pod("1", Some(("batch/v1", "Job", "a")))];
        assert_eq!(found(&api, pods).await, [Controller::Failed(without_scale)]);
    }

    #[tokio::test]
    async fn the_number_of_reads_is_limited() {
        let api = TestApi::new(&[]);
        let names: Vec<String> = (0..=MAX_READS).map(|number| format!("c{number}")).collect();
        let pods = names.iter().map(|name| pod(name, Some(("db.io/v1", "Database", name)))).collect();
        let last = found(&api, pods).await.pop();
        assert!(matches!(last, Some(Controller::Failed(why)) if why.contains("more than 5 controllers")));
    }

    #[tokio::test(start_paused = true)]
    async fn servers_that_do_not_respond_occupy_the_worker_for_a_short_time() {
        let service = tower::service_fn(|_request: http::Request<kube::client::Body>| {
            std::future::pending::<Result<http::Response<String>, std::convert::Infallible>>()
        });
        let client = kube::Client::new(service, "default");
        let recorder = coracle_events::recorder(client.clone(), "").0;
        let context = Context::new(client, recorder, ControllersConfig::default());
        let names: Vec<String> = (0..MAX_READS).map(|number| format!("c{number}")).collect();
        let pods = names.iter().map(|name| pod(name, Some(("db.io/v1", "Database", name)))).collect();
        let began = Instant::now();
        let selected = Controllers::new(&context, "n").of(pods).await;
        assert!(began.elapsed() < READ_TIME + Duration::from_secs(1), "{:?}", began.elapsed());
        for one in selected {
            assert!(matches!(one.controller, Controller::Failed(why) if why.contains("in time")));
        }
    }
}
