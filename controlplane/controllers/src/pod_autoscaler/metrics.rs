//! Reads metrics from `metrics.k8s.io`, `custom.metrics.k8s.io` and `external.metrics.k8s.io`.

use std::collections::BTreeMap;
use std::time::Duration;

use coracle_values::CollectMap;
use coracle_values::label_selector::LabelSelector;
use coracle_values::quantity::millis_of;
use jiff::Timestamp;
use k8s_openapi::api::autoscaling::v2::{CrossVersionObjectReference, MetricIdentifier, MetricSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector as ApiSelector, ObjectMeta};
use kube::Client;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::pod::{PodValue, PodValues};
use crate::scale_target::{self, Group};

const RESOURCE: &str = "/apis/metrics.k8s.io/v1beta1";
/// Group of custom metrics. Its server may have only one of the versions, for example v1beta1 with prometheus-adapter.
const CUSTOM: &str = "custom.metrics.k8s.io";
/// Versions of [`CUSTOM`] that this controller reads, as upstream. Their paths are the same.
const CUSTOM_VERSIONS: [&str; 2] = ["v1beta2", "v1beta1"];
const EXTERNAL: &str = "/apis/external.metrics.k8s.io/v1beta1";
/// Window of custom metrics that do not state their window.
const DEFAULT_WINDOW: Duration = Duration::from_secs(60);
/// Characters of a path that are encoded. All other characters are unreserved (RFC 3986).
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

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
    /// Servers in Go may write null for an empty list.
    items: Option<Vec<T>>,
}

#[derive(Deserialize)]
struct PodMetrics {
    metadata: ObjectMeta,
    timestamp: Timestamp,
    /// Window of the measurement, as a Go duration.
    window: String,
    containers: Option<Vec<ContainerMetrics>>,
}

#[derive(Deserialize)]
struct ContainerMetrics {
    name: String,
    usage: Option<BTreeMap<String, Quantity>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct MetricValue {
    described_object: CrossVersionObjectReference,
    /// Time of the value. `None` for the zero time of Go, which is null in JSON.
    timestamp: Option<Timestamp>,
    /// The version v1beta1 has the name `window` for this field.
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
        let pods = list.items.unwrap_or_default();
        if pods.is_empty() {
            return Err("no metrics returned from resource metrics API".to_owned());
        }
        Ok(Measured::Pods(pods.into_iter().filter_map(|pod| pod.value(name, container)).collect_map()))
    }

    async fn pods(&self, metric: &MetricIdentifier) -> Result<Measured, String> {
        let failed = |error: String| format!("unable to fetch metrics from custom metrics API: {error}");
        let name = segment(&metric.name);
        let version = self.custom_version().await.map_err(failed)?;
        let path = format!("{version}/namespaces/{}/pods/*/{name}", segment(self.namespace));
        let mut query = vec![("labelSelector", self.selector.to_owned())];
        query.extend(selector_of(metric.selector.as_ref())?.map(|text| ("metricLabelSelector", text)));
        let list: List<MetricValue> = self.get(&path, &query).await.map_err(failed)?;
        let values = list.items.unwrap_or_default();
        if values.is_empty() {
            return Err("no metrics returned from custom metrics API".to_owned());
        }
        let value = |one: MetricValue| {
            let window = one.window_seconds.map_or(DEFAULT_WINDOW, Duration::from_secs);
            let time = one.timestamp.unwrap_or(Timestamp::UNIX_EPOCH);
            let value = PodValue { time, window, millis: millis_of(&one.value) };
            (one.described_object.name, value)
        };
        Ok(Measured::Pods(values.into_iter().map(value).collect_map()))
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
            let kind = scale_target::resource_of(self.client, version, &object.kind).await.map_err(failed)?;
            let group = if kind.group.is_empty() { String::new() } else { format!(".{}", kind.group) };
            let place = segment(&format!("{}{group}", kind.plural));
            format!("{custom}/namespaces/{namespace}/{place}/{}/{name}", segment(&object.name))
        };
        let query: Vec<_> = selector_of(metric.selector.as_ref())?
            .map(|text| ("metricLabelSelector", text))
            .into_iter()
            .collect();
        let list: List<MetricValue> = self.get(&path, &query).await.map_err(failed)?;
        match list.items.as_deref().unwrap_or_default() {
            [only] => Ok(Measured::Value(millis_of(&only.value))),
            values => Err(failed(format!(
                "the custom metrics API server returned {} results when we asked for exactly one",
                values.len()
            ))),
        }
    }

    /// The path of the version of custom metrics to read: the server's preferred version, otherwise the first known
    /// version.
    async fn custom_version(&self) -> Result<String, String> {
        let group = Group::read(self.client, CUSTOM).await.map_err(|error| match error {
            kube::Error::Api(status) if status.code == 404 => {
                format!("no custom metrics API ({CUSTOM}) registered")
            }
            other => coracle_events::cause(&other),
        })?;
        let version = group.versions().find(|version| CUSTOM_VERSIONS.contains(version));
        let version = version.ok_or("no known available metric versions found")?;
        Ok(format!("/apis/{CUSTOM}/{version}"))
    }

    async fn external(&self, metric: &MetricIdentifier) -> Result<Measured, String> {
        let failed = |error: String| format!("unable to fetch metrics from external metrics API: {error}");
        let path = format!("{EXTERNAL}/namespaces/{}/{}", segment(self.namespace), segment(&metric.name));
        let query: Vec<_> =
            selector_of(metric.selector.as_ref())?.map(|text| ("labelSelector", text)).into_iter().collect();
        let list: List<ExternalValue> = self.get(&path, &query).await.map_err(failed)?;
        let values = list.items.unwrap_or_default();
        if values.is_empty() {
            return Err("no metrics returned from external metrics API".to_owned());
        }
        let sum = values.iter().fold(0_i64, |sum, one| sum.saturating_add(millis_of(&one.value)));
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
    /// The usage of the pod or of one container. `None` if a container has no usage of this resource, or if the pod has
    /// no such container. The metric of this pod is then missing, as upstream since 1.36.
    fn value(self, name: &str, container: Option<&str>) -> Option<(String, PodValue)> {
        let containers = self.containers.unwrap_or_default();
        let wanted = containers.iter().filter(|one| container.is_none_or(|name| one.name == name));
        let usage = wanted.map(|one| one.usage.as_ref()?.get(name).map(millis_of));
        let usage = usage.collect::<Option<Vec<i64>>>().filter(|usage| !usage.is_empty())?;
        let millis = usage.into_iter().fold(0, i64::saturating_add);
        let value = PodValue { time: self.timestamp, window: duration(&self.window), millis };
        Some((self.metadata.name.unwrap_or_default(), value))
    }
}

/// One segment of a path. It never changes the path: `.` and `..` are encoded, too.
fn segment(text: &str) -> String {
    let encoded = if matches!(text, "." | "..") { NON_ALPHANUMERIC } else { ENCODED };
    utf8_percent_encode(text, encoded).to_string()
}

/// A selector in text form. `None` if it selects all objects.
fn selector_of(selector: Option<&ApiSelector>) -> Result<Option<String>, String> {
    let Some(selector) = selector else { return Ok(None) };
    let selector = LabelSelector::try_from(selector).map_err(|error| error.to_string())?;
    Ok((!selector.is_empty()).then(|| selector.to_string()))
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
        let (name, value) = metrics().value("cpu", None).unwrap();
        assert_eq!((name.as_str(), value.millis, value.window), ("p", 500, Duration::from_millis(15_200)));
        assert_eq!(metrics().value("cpu", Some("b")).unwrap().1.millis, 250);
        assert!(metrics().value("memory", None).is_none());
        assert!(metrics().value("cpu", Some("x")).is_none(), "a pod without the container");
        let empty = json!({"metadata": {"name": "p"}, "timestamp": "2024-01-01T00:00:00Z", "window": "0s",
            "containers": null});
        assert!(serde_json::from_value::<PodMetrics>(empty).unwrap().value("cpu", None).is_none());
    }

    #[test]
    fn selectors_have_a_text_form() {
        let selector = serde_json::from_value(json!({"matchLabels": {"a": "b"},
            "matchExpressions": [{"key": "c", "operator": "NotIn", "values": ["d", "e"]}]}));
        let text = selector_of(Some(&selector.unwrap())).unwrap();
        assert_eq!(text.as_deref(), Some("a=b,c notin (d,e)"));
        assert_eq!(segment("../x y"), "..%2Fx%20y");
        assert_eq!([segment(".."), segment("."), segment("a-b_c.d")], ["%2E%2E", "%2E", "a-b_c.d"]);
    }

    /// Reads a metric of the target whose pods have the label `app=a`, from an API with these objects.
    async fn read(objects: &[(&str, Value)], metric: Value) -> Result<Measured, String> {
        let api = TestApi::new(objects);
        let selected = Selected { client: &api.context.client, namespace: "n", selector: "app=a" };
        selected.read(&serde_json::from_value(metric).unwrap()).await
    }

    /// The paths are those of upstream's client for custom metrics, which prometheus-adapter and others serve.
    #[tokio::test]
    async fn a_metric_of_an_object_is_one_value_at_the_path_of_its_resource() {
        const CUSTOM: &str = "/apis/custom.metrics.k8s.io/v1beta1/namespaces/n";
        let value = json!({"describedObject": {"kind": "Ingress", "name": "web.a"}, "metricName": "hits_per-second",
            "timestamp": null, "value": "1500m"});
        let group = json!({"versions": [{"version": "v1beta1"}]});
        let ingresses = json!({"name": "ingresses", "singularName": "ingress", "namespaced": true, "kind": "Ingress",
            "verbs": ["get"]});
        let kinds = json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "networking.k8s.io/v1",
            "resources": [ingresses]});
        let path = format!("{CUSTOM}/ingresses.networking.k8s.io/web.a/hits_per-second");
        let of_namespace = format!("{CUSTOM}/metrics/hits_per-second");
        let object = |version: &str, kind: &str| {
            let described = json!({"apiVersion": version, "kind": kind, "name": "web.a"});
            let target = json!({"type": "Value", "value": "1"});
            json!({"type": "Object", "object": {"describedObject": described, "metric": {"name": "hits_per-second"},
                "target": target}})
        };
        for (values, expect) in [
            (json!([value]), Some(1500)),
            (json!([value, value]), None),
            (json!([]), None),
            (Value::Null, None),
        ] {
            let objects = [
                ("/apis/custom.metrics.k8s.io", group.clone()),
                ("/apis/networking.k8s.io/v1", kinds.clone()),
                (path.as_str(), json!({"items": values})),
                (of_namespace.as_str(), json!({"items": values})),
            ];
            for metric in [object("networking.k8s.io/v1", "Ingress"), object("v1", "Namespace")] {
                let found = read(&objects, metric).await;
                let Some(expect) = expect else {
                    let error = found.unwrap_err();
                    assert!(error.ends_with("results when we asked for exactly one"), "{error}");
                    continue;
                };
                assert!(matches!(found, Ok(Measured::Value(found)) if found == expect), "{found:?}");
            }
        }
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
        read(&objects, metric).await
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
        let none = "no metrics returned from external metrics API";
        for (list, expect) in
            [(list, Ok(3500)), (json!({"items": []}), Err(none)), (json!({"items": null}), Err(none))]
        {
            match (read(&[(path, list)], metric.clone()).await, expect) {
                (Ok(Measured::Value(found)), Ok(expect)) => assert_eq!(found, expect),
                (Err(found), Err(expect)) => assert!(found.starts_with(expect), "{found}"),
                (found, expect) => panic!("{found:?} is not {expect:?}"),
            }
        }
    }
}
