//! Reads metrics from `metrics.k8s.io`, `custom.metrics.k8s.io` and `external.metrics.k8s.io`.

use std::collections::BTreeMap;
use std::time::Duration;

use coracle_values::label_selector::LabelSelector;
use coracle_values::quantity::millis_of;
use jiff::Timestamp;
use k8s_openapi::api::autoscaling::v2::{CrossVersionObjectReference, MetricIdentifier, MetricSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector as ApiSelector, ObjectMeta};
use kube::Client;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::pod::{PodValue, PodValues};
use super::target;

const RESOURCE: &str = "/apis/metrics.k8s.io/v1beta1";
/// Group of custom metrics. Its server may have only one of the versions, for example v1beta1 with prometheus-adapter.
const CUSTOM: &str = "custom.metrics.k8s.io";
/// Versions of [`CUSTOM`] that this controller reads, as upstream. Their paths are the same.
const CUSTOM_VERSIONS: [&str; 2] = ["v1beta2", "v1beta1"];
const EXTERNAL: &str = "/apis/external.metrics.k8s.io/v1beta1";
/// Window of custom metrics that do not state their window.
const DEFAULT_WINDOW: Duration = Duration::from_secs(60);

/// The values of one metric.
#[derive(Clone, Debug)]
pub(crate) enum Measured {
    /// A value for each pod.
    Pods(PodValues),
    /// One value, in thousandths.
    Value(i64),
}

/// The pods of the target, by namespace and selector.
pub(crate) struct Selected<'a> {
    pub(crate) client: &'a Client,
    pub(crate) namespace: &'a str,
    /// The selector of the pods in text form.
    pub(crate) selector: &'a str,
}

#[derive(Deserialize)]
struct List<T> {
    items: Vec<T>,
}

/// The discovery document of a group.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Group {
    preferred_version: Option<GroupVersion>,
    #[serde(default)]
    versions: Vec<GroupVersion>,
}

#[derive(Deserialize)]
struct GroupVersion {
    version: String,
}

#[derive(Deserialize)]
struct PodMetrics {
    metadata: ObjectMeta,
    timestamp: Timestamp,
    /// In the format of Go durations.
    window: String,
    #[serde(default)]
    containers: Vec<ContainerMetrics>,
}

#[derive(Deserialize)]
struct ContainerMetrics {
    name: String,
    #[serde(default)]
    usage: BTreeMap<String, Quantity>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct MetricValue {
    described_object: CrossVersionObjectReference,
    timestamp: Timestamp,
    /// The version v1beta1 calls it `window`.
    #[serde(alias = "window")]
    window_seconds: Option<u64>,
    value: Quantity,
}

#[derive(Deserialize)]
struct ExternalValue {
    value: Quantity,
}

impl Selected<'_> {
    /// Reads one metric. The error is the part of upstream's message that comes from its metrics client.
    pub(crate) async fn read(&self, spec: &MetricSpec) -> Result<Measured, String> {
        if let Some(source) = &spec.resource {
            return self.resource(&source.name, None).await;
        }
        if let Some(source) = &spec.container_resource {
            return self.resource(&source.name, Some(&source.container)).await;
        }
        if let Some(source) = &spec.pods {
            return self.pods(&source.metric).await;
        }
        if let Some(source) = &spec.object {
            return self.object(&source.described_object, &source.metric).await;
        }
        match &spec.external {
            Some(source) => self.external(&source.metric).await,
            None => Err(format!("unknown metric source type \"{}\"", spec.type_)),
        }
    }

    async fn resource(&self, name: &str, container: Option<&str>) -> Result<Measured, String> {
        let failed = |error: String| format!("unable to fetch metrics from resource metrics API: {error}");
        let path = format!("{RESOURCE}/namespaces/{}/pods", segment(self.namespace));
        let query = [("labelSelector", self.selector.to_owned())];
        let list: List<PodMetrics> = self.get(&path, &query).await.map_err(failed)?;
        if list.items.is_empty() {
            return Err("no metrics returned from resource metrics API".to_owned());
        }
        let values = list.items.into_iter().filter_map(|pod| pod.value(name, container).transpose());
        Ok(Measured::Pods(values.collect::<Result<_, String>>()?))
    }

    async fn pods(&self, metric: &MetricIdentifier) -> Result<Measured, String> {
        let failed = |error: String| format!("unable to fetch metrics from custom metrics API: {error}");
        let name = segment(&metric.name);
        let version = self.custom_version().await.map_err(failed)?;
        let path = format!("{version}/namespaces/{}/pods/*/{name}", segment(self.namespace));
        let mut query = vec![("labelSelector", self.selector.to_owned())];
        query.extend(selector_of(metric.selector.as_ref())?.map(|text| ("metricLabelSelector", text)));
        let list: List<MetricValue> = self.get(&path, &query).await.map_err(failed)?;
        if list.items.is_empty() {
            return Err("no metrics returned from custom metrics API".to_owned());
        }
        let value = |one: MetricValue| {
            let window = one.window_seconds.map_or(DEFAULT_WINDOW, Duration::from_secs);
            let value = PodValue { time: one.timestamp, window, millis: millis_of(&one.value) };
            (one.described_object.name, value)
        };
        Ok(Measured::Pods(list.items.into_iter().map(value).collect()))
    }

    async fn object(
        &self,
        object: &CrossVersionObjectReference,
        metric: &MetricIdentifier,
    ) -> Result<Measured, String> {
        let failed = |error: String| format!("unable to fetch metrics from custom metrics API: {error}");
        let (namespace, name) = (segment(self.namespace), segment(&metric.name));
        let custom = self.custom_version().await.map_err(failed)?;
        let version = object.api_version.as_deref().unwrap_or("v1");
        let path = if object.kind == "Namespace" && !version.contains('/') {
            // The object is a namespace. Its name is not used: an autoscaler reads metrics of its own namespace only.
            format!("{custom}/namespaces/{namespace}/metrics/{name}")
        } else {
            let kind = target::resource_of(self.client, version, &object.kind).await.map_err(failed)?;
            let group = if kind.group.is_empty() { String::new() } else { format!(".{}", kind.group) };
            let place = segment(&format!("{}{group}", kind.plural));
            format!("{custom}/namespaces/{namespace}/{place}/{}/{name}", segment(&object.name))
        };
        let query: Vec<_> = selector_of(metric.selector.as_ref())?
            .map(|text| ("metricLabelSelector", text))
            .into_iter()
            .collect();
        let list: List<MetricValue> = self.get(&path, &query).await.map_err(failed)?;
        let value = list.items.first().ok_or("no metrics returned from custom metrics API")?;
        Ok(Measured::Value(millis_of(&value.value)))
    }

    /// The path of the version of custom metrics to read: the server's preferred one, or else the first known one.
    async fn custom_version(&self) -> Result<String, String> {
        let request = http::Request::get(format!("/apis/{CUSTOM}")).body(Vec::new());
        let group = self.client.request::<Group>(request.map_err(|error| error.to_string())?).await;
        let group = group.map_err(|error| match error {
            kube::Error::Api(status) if status.code == 404 => {
                format!("no custom metrics API ({CUSTOM}) registered")
            }
            other => coracle_events::cause(&other),
        })?;
        let served = group.preferred_version.iter().chain(&group.versions);
        let mut known = served.map(|one| one.version.as_str()).filter(|one| CUSTOM_VERSIONS.contains(one));
        let version = known.next().ok_or("no known available metric versions found")?;
        Ok(format!("/apis/{CUSTOM}/{version}"))
    }

    async fn external(&self, metric: &MetricIdentifier) -> Result<Measured, String> {
        let failed = |error: String| format!("unable to fetch metrics from external metrics API: {error}");
        let path = format!("{EXTERNAL}/namespaces/{}/{}", segment(self.namespace), segment(&metric.name));
        let query: Vec<_> =
            selector_of(metric.selector.as_ref())?.map(|text| ("labelSelector", text)).into_iter().collect();
        let list: List<ExternalValue> = self.get(&path, &query).await.map_err(failed)?;
        if list.items.is_empty() {
            return Err("no metrics returned from external metrics API".to_owned());
        }
        let sum = list.items.iter().fold(0_i64, |sum, one| sum.saturating_add(millis_of(&one.value)));
        Ok(Measured::Value(sum))
    }

    async fn get<T: DeserializeOwned>(&self, path: &str, query: &[(&str, String)]) -> Result<T, String> {
        let encode = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        let query: Vec<String> =
            query.iter().map(|(name, value)| format!("{name}={}", encode(value))).collect();
        let uri = format!("{path}?{}", query.join("&"));
        let request = http::Request::get(uri).body(Vec::new()).map_err(|error| error.to_string())?;
        self.client.request(request).await.map_err(|error| coracle_events::cause(&error))
    }
}

impl PodMetrics {
    /// The usage of the pod or of one container. `None` if a container has no usage of this resource.
    fn value(self, name: &str, container: Option<&str>) -> Result<Option<(String, PodValue)>, String> {
        let pod = self.metadata.name.unwrap_or_default();
        let wanted: Vec<&ContainerMetrics> =
            self.containers.iter().filter(|one| container.is_none_or(|name| one.name == name)).collect();
        if let (Some(container), true) = (container, wanted.is_empty()) {
            let namespace = self.metadata.namespace.unwrap_or_default();
            return Err(format!("container {container} not present in metrics for pod {namespace}/{pod}"));
        }
        let usage: Option<Vec<i64>> = wanted.iter().map(|one| one.usage.get(name).map(millis_of)).collect();
        let usage = usage.filter(|usage| !usage.is_empty());
        Ok(usage.map(|usage| {
            let millis = usage.into_iter().fold(0, i64::saturating_add);
            (pod, PodValue { time: self.timestamp, window: duration(&self.window), millis })
        }))
    }
}

/// One segment of a path.
fn segment(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

/// A selector in text form. `None` if it selects everything.
fn selector_of(selector: Option<&ApiSelector>) -> Result<Option<String>, String> {
    let Some(selector) = selector else { return Ok(None) };
    LabelSelector::try_from(selector).map_err(|error| error.to_string())?;
    let labels = selector.match_labels.iter().flatten().map(|(key, value)| format!("{key}={value}"));
    let expressions = selector.match_expressions.iter().flatten().map(|one| {
        let values = one.values.iter().flatten().cloned().collect::<Vec<_>>().join(",");
        match one.operator.as_str() {
            "In" => format!("{} in ({values})", one.key),
            "NotIn" => format!("{} notin ({values})", one.key),
            "DoesNotExist" => format!("!{}", one.key),
            _ => one.key.clone(),
        }
    });
    let text = labels.chain(expressions).collect::<Vec<_>>().join(",");
    Ok((!text.is_empty()).then_some(text))
}

/// A Go duration, for example `1m30.5s`. An invalid duration is zero.
fn duration(text: &str) -> Duration {
    text.parse::<jiff::SignedDuration>().ok().and_then(|parsed| parsed.try_into().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_api::TestApi;
    use serde_json::{Value, json};

    fn metrics() -> PodMetrics {
        let container = |name: &str| json!({"name": name, "usage": {"cpu": "250000000n"}});
        let value = json!({"metadata": {"name": "p", "namespace": "n"}, "timestamp": "2024-01-01T00:00:00Z",
            "window": "15.2s", "containers": [container("a"), container("b")]});
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn usage_is_the_usage_of_the_pod_or_of_one_container() {
        let (name, value) = metrics().value("cpu", None).unwrap().unwrap();
        assert_eq!((name.as_str(), value.millis, value.window), ("p", 500, Duration::from_millis(15_200)));
        assert_eq!(metrics().value("cpu", Some("b")).unwrap().unwrap().1.millis, 250);
        assert!(metrics().value("memory", None).unwrap().is_none());
        let error = metrics().value("cpu", Some("x")).unwrap_err();
        assert_eq!(error, "container x not present in metrics for pod n/p");
    }

    #[test]
    fn selectors_have_a_text_form() {
        let selector = serde_json::from_value(json!({"matchLabels": {"a": "b"},
            "matchExpressions": [{"key": "c", "operator": "NotIn", "values": ["d", "e"]}]}));
        let text = selector_of(Some(&selector.unwrap())).unwrap();
        assert_eq!(text.as_deref(), Some("a=b,c notin (d,e)"));
        assert_eq!(segment("../x y"), "%2E%2E%2Fx%20y");
    }

    /// Reads the metric `hits` of the pods, or of a Service, from a server with these versions. The first is preferred.
    async fn custom(versions: &[&str], metric: Value) -> Result<Measured, String> {
        let object = json!({"kind": "Pod", "name": "p"});
        let of = |window: &str| {
            let value = json!({"describedObject": object, "timestamp": "2024-01-01T00:00:00Z", window: 30, "value": "2"});
            json!({"items": [value]})
        };
        let listed: Vec<Value> = versions.iter().map(|version| json!({"version": version})).collect();
        let group = json!({"preferredVersion": listed.first(), "versions": listed});
        let mut objects = vec![("/apis/custom.metrics.k8s.io", group)];
        let services = json!({"name": "services", "singularName": "service", "namespaced": true, "kind": "Service",
            "verbs": ["get"]});
        let core = json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "v1", "resources": [services]});
        objects.push(("/api/v1", core));
        if versions.contains(&"v1beta1") {
            objects.push(("/apis/custom.metrics.k8s.io/v1beta1/namespaces/n/pods/*/hits", of("window")));
            objects.push(("/apis/custom.metrics.k8s.io/v1beta1/namespaces/n/services/s/hits", of("window")));
        }
        if versions.contains(&"v1beta2") {
            objects
                .push(("/apis/custom.metrics.k8s.io/v1beta2/namespaces/n/pods/*/hits", of("windowSeconds")));
        }
        if versions.is_empty() {
            objects.clear();
        }
        let api = TestApi::new(&objects);
        let selected = Selected { client: &api.context.client, namespace: "n", selector: "app=a" };
        selected.read(&serde_json::from_value(metric).unwrap()).await
    }

    #[tokio::test]
    async fn custom_metrics_have_the_version_of_their_server() {
        let target = json!({"type": "AverageValue", "averageValue": "1"});
        let pods = json!({"type": "Pods", "pods": {"metric": {"name": "hits"}, "target": target}});
        for versions in [&["v1beta1"][..], &["v1beta2", "v1beta1"], &["v1", "v1beta1"]] {
            let Ok(Measured::Pods(values)) = custom(versions, pods.clone()).await else {
                panic!("{versions:?}")
            };
            assert_eq!((values["p"].millis, values["p"].window), (2000, Duration::from_secs(30)));
        }
        let service = json!({"kind": "Service", "name": "s", "apiVersion": "v1"});
        let target = json!({"type": "Value", "value": "1"});
        let object = json!({"describedObject": service, "metric": {"name": "hits"}, "target": target});
        let value = custom(&["v1beta1"], json!({"type": "Object", "object": object})).await;
        assert!(matches!(value, Ok(Measured::Value(2000))), "{value:?}");
        let error = custom(&[], pods.clone()).await.unwrap_err();
        assert!(error.ends_with("no custom metrics API (custom.metrics.k8s.io) registered"), "{error}");
        let error = custom(&["v1"], pods).await.unwrap_err();
        assert!(error.ends_with("no known available metric versions found"), "{error}");
    }
    #[tokio::test]
    async fn an_external_metric_is_the_sum_of_its_values() {
        let value =
            |value: &str| json!({"metricName": "depth", "timestamp": "2024-01-01T00:00:00Z", "value": value});
        let path = "/apis/external.metrics.k8s.io/v1beta1/namespaces/n/depth";
        let list = json!({"items": [value("1"), value("2500m")]});
        let target = json!({"type": "Value", "value": "1"});
        let metric = json!({"type": "External", "external": {"metric": {"name": "depth"}, "target": target}});
        let metric: MetricSpec = serde_json::from_value(metric).unwrap();
        for (list, expect) in [(list, Ok(3500)), (json!({"items": []}), Err("no metrics returned"))] {
            let api = TestApi::new(&[(path, list)]);
            let selected = Selected { client: &api.context.client, namespace: "n", selector: "app=a" };
            match (selected.read(&metric).await, expect) {
                (Ok(Measured::Value(found)), Ok(expect)) => assert_eq!(found, expect),
                (Err(found), Err(expect)) => assert!(found.starts_with(expect), "{found}"),
                (found, expect) => panic!("{found:?} is not {expect:?}"),
            }
        }
    }
}
