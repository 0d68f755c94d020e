//! `metrics.k8s.io`: usage of nodes and pods, computed for each request from the kubelets' summaries.
//!
//! A CPU rate needs two samples. Samples are kept for a minute, so that the next request needs only one more sample.
//! Without earlier samples a request takes two samples, one second apart. Without requests nothing is sampled, except
//! for the plugin InitialResources ([`record`]).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use coracle_kinds::{Resource, kind::by_resource};
use coracle_values::CollectMap;
use futures::StreamExt as _;
use http::Request;
use http_body_util::{BodyExt as _, Limited};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{
    cache::Object,
    call::Call,
    error::{ApiError, Result},
    media::Form,
    offload::{self, MIN_OFFLOADED_BYTES},
    reply::{self, Reply},
    state::State,
    sub::kubelet,
    usage_history::UsageHistory,
    usage_samples::{FAILURE_BACKOFF, LastResult, MAX_WINDOW, NodeSamples, Pair, Rate, Sample},
    verb::list,
};

/// API group.
pub(crate) const GROUP: &str = "metrics.k8s.io";

/// Samples younger than this are reused.
const MAX_FRESH_AGE: Duration = Duration::from_secs(10);
/// Time between the two samples if there is no earlier sample.
const MIN_WINDOW: Duration = Duration::from_secs(1);
/// Maximum time to get the samples of a node, with the wait for another request that gets them.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bytes of a summary.
const MAX_SUMMARY: usize = 16 << 20;
/// Maximum number of concurrent requests to nodes.
const MAX_CONCURRENT_REQUESTS: usize = 32;

/// Reads the usage of one object, or of the objects that the query selects.
pub(crate) async fn run(call: &Call) -> Result<Reply> {
    let form = call.form()?;
    let source = by_resource("", "v1", &call.kind.plural).ok_or_else(ApiError::no_resource)?;
    if call.info.verb == "list" {
        let scope = list::scope_of(call, source)?;
        let objects = call.state.cache.list(source, call.namespace());
        let objects = objects.iter().filter(|object| scope.selects(source, object));
        let items = measure(call, objects.map(|object| object.value()).collect()).await;
        return Ok(list_reply(call, form, items));
    }
    let name = &call.resource.name;
    let object: Option<Arc<Object>> = call.state.cache.get(source, call.namespace(), name);
    let object = object.ok_or_else(|| ApiError::not_found(&call.kind, name))?.value();
    let measured = measure(call, vec![object]).await.pop();
    let measured = measured.ok_or_else(|| ApiError::not_found(&call.kind, name))?;
    Ok(match form {
        Form::Table(content) => {
            let table = reply::table_of(&call.kind, [&measured], json!({}), reply::options(content));
            reply::json(200, &table)
        }
        Form::Partial(version) | Form::PartialProtobuf(version) => {
            reply::json(200, &coracle_kinds::table::partial_metadata(&measured, version))
        }
        _ => reply::json(200, &measured),
    })
}

fn list_reply(call: &Call, form: Form, items: Vec<Value>) -> Reply {
    let kind: &Resource = &call.kind;
    if let Form::Table(content) = form {
        return reply::json(200, &reply::table_of(kind, &items, json!({}), reply::options(content)));
    }
    reply::json(
        200,
        &json!({"kind": kind.list_kind, "apiVersion": kind.api_version(), "metadata": {}, "items": items}),
    )
}

/// The node that reports the usage of a node or pod. `None` for a pod that does not run.
fn node_of(call: &Call, object: &Value) -> Option<String> {
    let is_pod = call.kind.namespaced;
    if is_pod && object["status"]["phase"] != "Running" {
        return None;
    }
    let name = if is_pod { &object["spec"]["nodeName"] } else { &object["metadata"]["name"] };
    name.as_str().filter(|name| !name.is_empty()).map(str::to_owned)
}

/// The usage of nodes or pods. Omits objects without usage: their node does not respond, or they do not run.
async fn measure(call: &Call, objects: Vec<Value>) -> Vec<Value> {
    let pairs = samples_of(call, &objects).await;
    let measured = objects.iter().filter_map(|object| {
        let (earlier, later) = pairs.get(&node_of(call, object)?)?;
        match call.kind.namespaced {
            true => pod(call, object, earlier, later),
            false => node(call, object, earlier, later),
        }
    });
    measured.collect()
}

/// Records the usage of all running containers in the history.
pub(crate) async fn record(state: &Arc<State>, history: &UsageHistory) {
    let (Some(pods), Some(usage)) = (by_resource("", "v1", "pods"), by_resource(GROUP, "v1beta1", "pods"))
    else {
        return;
    };
    let call = Call::internal(state, usage.clone(), &json!({}));
    let fields: [&[&str]; 5] = [
        &["metadata", "namespace"],
        &["metadata", "uid"],
        &["spec", "nodeName"],
        &["spec", "containers"],
        &["status", "phase"],
    ];
    let objects: Vec<Value> = state.cache.list(pods, "").iter().map(|object| object.part(&fields)).collect();
    let pairs = samples_of(&call, &objects).await;
    let now = u64::try_from(jiff::Timestamp::now().as_second()).unwrap_or(0);
    for object in &objects {
        let Some(pair) = node_of(&call, object).and_then(|node| pairs.get(&node)) else { continue };
        for (image, rate) in images(object, pair) {
            let namespace = object["metadata"]["namespace"].as_str().unwrap_or_default();
            history.record(namespace, image, rate.container_usage(), now);
        }
    }
}

/// The images of a pod's containers, with their usage.
fn images<'a>(object: &'a Value, (earlier, later): &Pair) -> Vec<(&'a str, Rate)> {
    let rates = later.pod_since(earlier, object["metadata"]["uid"].as_str().unwrap_or_default());
    let containers = object["spec"]["containers"].as_array().into_iter().flatten();
    let named = containers.filter_map(|one| Some((one["name"].as_str()?, one["image"].as_str()?)));
    // A map keeps look-ups fast: the node and the author of the pod choose the number of containers.
    let images: HashMap<&str, &str> = named.collect();
    rates.into_iter().filter_map(|(name, rate)| Some((*images.get(name)?, rate))).collect()
}

/// Two samples for each node of the objects. Nodes that do not respond are omitted.
async fn samples_of(call: &Call, objects: &[Value]) -> HashMap<String, Pair> {
    call.state.usage.prune();
    let nodes: BTreeSet<String> = objects.iter().filter_map(|object| node_of(call, object)).collect();
    let samples = futures::stream::iter(nodes).map(|node| async move {
        let pair = sampled(call, &node).await;
        (node, pair)
    });
    let mut pairs: HashMap<String, Pair> = HashMap::new();
    let mut samples = std::pin::pin!(samples.buffer_unordered(MAX_CONCURRENT_REQUESTS));
    while let Some((node, pair)) = samples.next().await {
        match pair {
            Ok(pair) => drop(pairs.insert(node, pair)),
            Err(error) => {
                tracing::debug!(node, error = %error.status(), "cannot measure the usage of a node")
            }
        }
    }
    pairs
}

fn node(call: &Call, object: &Value, earlier: &Sample, later: &Sample) -> Option<Value> {
    let rate = later.node_since(earlier)?;
    let mut measured = head(call, object, &rate);
    measured.insert("usage".to_owned(), rate.usage());
    Some(measured.into())
}

fn pod(call: &Call, object: &Value, earlier: &Sample, later: &Sample) -> Option<Value> {
    let rates = declared(object, later.pod_since(earlier, object["metadata"]["uid"].as_str()?));
    let mut measured = head(call, object, &rates.first()?.1);
    let containers = rates.iter().map(|(name, rate)| json!({"name": name, "usage": rate.usage()}));
    measured.insert("containers".to_owned(), containers.collect());
    Some(measured.into())
}

/// The rates of the containers that the pod declares. The kubelet also reports containers that have ended.
fn declared<'a>(object: &Value, rates: Vec<(&'a str, Rate)>) -> Vec<(&'a str, Rate)> {
    let lists = ["containers", "initContainers"].map(|field| object["spec"][field].as_array());
    // A set keeps look-ups fast: the node and the author of the pod choose the number of containers.
    let names: HashSet<&str> =
        lists.into_iter().flatten().flatten().filter_map(|one| one["name"].as_str()).collect();
    rates.into_iter().filter(|(name, _)| names.contains(*name)).collect()
}

fn head(call: &Call, object: &Value, rate: &Rate) -> serde_json::Map<String, Value> {
    let time =
        |time: jiff::Timestamp| jiff::Timestamp::from_second(time.as_second()).unwrap_or(time).to_string();
    let mut metadata = json!({
        "name": object["metadata"]["name"],
        "creationTimestamp": time(jiff::Timestamp::now()),
    });
    if let Some(metadata) = metadata.as_object_mut() {
        for field in ["namespace", "labels"] {
            if let Some(value) = object["metadata"].get(field) {
                metadata.insert(field.to_owned(), value.clone());
            }
        }
    }
    let head = [
        ("kind", json!(call.kind.kind)),
        ("apiVersion", json!(call.kind.api_version())),
        ("metadata", metadata),
        ("timestamp", json!(time(rate.time))),
        ("window", json!(rate.window())),
    ];
    head.into_iter().map(|(name, value)| (name.to_owned(), value)).collect_map()
}

/// Two samples of a node, of which the later one is fresh.
async fn sampled(call: &Call, node: &str) -> Result<Pair> {
    let place = call.state.usage.of(node);
    sampled_by(&place, node, || fetch_sample(call, node)).await
}

/// The two samples of a node; the later one is fresh. `fetch` takes a sample.
async fn sampled_by<F, R>(place: &NodeSamples, node: &str, fetch: F) -> Result<Pair>
where
    F: Fn() -> R,
    R: Future<Output = Result<Sample>>,
{
    let late = || ApiError::timeout(format!("the kubelet of node {node} sends no summary"), 1);
    let deadline = Instant::now() + TIMEOUT;
    let Ok(mut last_result) = tokio::time::timeout_at(deadline, place.lock()).await else {
        return Err(late());
    };
    let earlier = match last_result.take() {
        Some(LastResult::Pair(pair)) if pair.1.taken.elapsed() < MAX_FRESH_AGE => {
            *last_result = Some(LastResult::Pair(pair.clone()));
            return Ok(pair);
        }
        Some(LastResult::Failure(time)) if time.elapsed() < FAILURE_BACKOFF => {
            *last_result = Some(LastResult::Failure(time));
            return Err(ApiError::unavailable(format!("the kubelet of node {node} failed a moment ago")));
        }
        Some(LastResult::Pair((_, later))) if later.taken.elapsed() <= MAX_WINDOW => Some(later),
        _ => None,
    };
    let is_short = deadline.saturating_duration_since(Instant::now()) < TIMEOUT / 2;
    let taken = tokio::time::timeout_at(deadline, pair_of(earlier, fetch)).await;
    *last_result = match &taken {
        Ok(Ok(pair)) => Some(LastResult::Pair(pair.clone())),
        // After a long wait for other requests, a healthy node can also be late.
        Err(_elapsed) if is_short => None,
        Ok(Err(_)) | Err(_) => Some(LastResult::Failure(Instant::now())),
    };
    taken.unwrap_or_else(|_elapsed| Err(late()))
}

/// Takes the missing samples of a pair.
async fn pair_of<F, R>(earlier: Option<Arc<Sample>>, fetch: F) -> Result<Pair>
where
    F: Fn() -> R,
    R: Future<Output = Result<Sample>>,
{
    let earlier = match earlier {
        Some(earlier) => earlier,
        None => {
            let first = Arc::new(fetch().await?);
            tokio::time::sleep(MIN_WINDOW).await;
            first
        }
    };
    Ok((earlier, Arc::new(fetch().await?)))
}

/// Fetches the summary of a node's kubelet.
async fn fetch_sample(call: &Call, node: &str) -> Result<Sample> {
    let request = Request::get("/stats/summary").body(reply::full("")).map_err(ApiError::internal)?;
    let taken = Instant::now();
    let answer = kubelet::send(call, node, request).await?;
    let code = answer.status().as_u16();
    let body = Limited::new(answer.into_body(), MAX_SUMMARY).collect().await;
    let body = body.map_err(ApiError::internal)?.to_bytes();
    if code != 200 {
        return Err(ApiError::of_node(code, &String::from_utf8_lossy(&body)));
    }
    offload::run(body.len() > MIN_OFFLOADED_BYTES, || Sample::parse(taken, &body)).map_err(ApiError::internal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usage_of_a_container_belongs_to_its_image() {
        let sample = |time: &str, cpu: u64| {
            let used = |name: &str| {
                json!({"name": name, "cpu": {"time": time, "usageCoreNanoSeconds": cpu},
                    "memory": {"workingSetBytes": 4096}})
            };
            let pod = json!({"podRef": {"uid": "1"}, "containers": [used("c"), used("unknown")]});
            let summary = json!({"node": used(""), "pods": [pod]}).to_string();
            Arc::new(Sample::parse(Instant::now(), summary.as_bytes()).unwrap())
        };
        let pair = (sample("2024-01-01T00:00:00Z", 0), sample("2024-01-01T00:00:10Z", 1_000_000_100));
        let pod =
            json!({"metadata": {"uid": "1"}, "spec": {"containers": [{"name": "c", "image": "web:1"}]}});
        let found = images(&pod, &pair);
        let [(image, rate)] = found.as_slice() else { panic!("{found:?}") };
        let usage = rate.container_usage();
        assert_eq!((*image, usage.cpu_millis, usage.memory_bytes), ("web:1", 101, 4096));
        assert!(images(&json!({"metadata": {"uid": "2"}}), &pair).is_empty());
    }

    #[test]
    fn a_pod_with_very_many_containers_takes_linear_time() {
        const CONTAINERS: usize = 40_000;
        let names: Vec<String> = (0..CONTAINERS).map(|number| format!("c{number}")).collect();
        let sample = |time: &str, cpu: u64| {
            let used = |name: &String| {
                json!({"name": name, "cpu": {"time": time, "usageCoreNanoSeconds": cpu},
                    "memory": {"workingSetBytes": 4096}})
            };
            let pod =
                json!({"podRef": {"uid": "1"}, "containers": names.iter().map(used).collect::<Vec<_>>()});
            let summary = json!({"node": used(&String::new()), "pods": [pod]}).to_string();
            Arc::new(Sample::parse(Instant::now(), summary.as_bytes()).unwrap())
        };
        let pair = (sample("2024-01-01T00:00:00Z", 0), sample("2024-01-01T00:00:10Z", 100));
        let containers: Vec<Value> =
            names.iter().map(|name| json!({"name": name, "image": "web:1"})).collect();
        let pod = json!({"metadata": {"uid": "1"}, "spec": {"containers": containers}});
        // A search of the list for each name would take minutes.
        assert_eq!(images(&pod, &pair).len(), CONTAINERS);
        assert_eq!(declared(&pod, pair.1.pod_since(&pair.0, "1")).len(), CONTAINERS);
        assert!(declared(&json!({"spec": {}}), pair.1.pod_since(&pair.0, "1")).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_never_answers_delays_concurrent_requests_once_and_later_ones_not() {
        let (place, began) = (NodeSamples::default(), Instant::now());
        let asked = std::sync::atomic::AtomicUsize::new(0);
        let stuck = || {
            asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            std::future::pending()
        };
        let requests = (0..8).map(|_| sampled_by(&place, "n", stuck));
        let results = futures::future::join_all(requests).await;
        assert!(results.iter().all(Result::is_err));
        assert!(began.elapsed() < TIMEOUT + Duration::from_secs(1), "{:?}", began.elapsed());
        let began = Instant::now();
        assert!(sampled_by(&place, "n", stuck).await.is_err());
        assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
        assert_eq!(asked.into_inner(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_for_another_request_and_the_samples_have_one_time_limit() {
        let (place, began) = (NodeSamples::default(), Instant::now());
        let other = place.lock().await;
        let release = async move {
            tokio::time::sleep(TIMEOUT * 9 / 10).await;
            drop(other);
        };
        let (result, ()) = tokio::join!(sampled_by(&place, "n", std::future::pending), release);
        assert!(result.is_err());
        assert!(began.elapsed() < TIMEOUT + Duration::from_secs(1), "{:?}", began.elapsed());
        assert!(place.lock().await.is_none(), "the next request asks the node again");
    }
}
