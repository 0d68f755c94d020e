//! Compares `/metrics` with the names, types, labels and buckets of upstream.

use std::collections::BTreeSet;

use super::*;

/// Each line has a name, a type, the labels, and the upper bounds of the buckets.
const UPSTREAM: &str = include_str!("upstream_metrics.txt");

/// A metric of upstream.
struct Metric {
    name: &'static str,
    kind: &'static str,
    labels: BTreeSet<&'static str>,
    buckets: Vec<f64>,
}

fn upstream() -> Vec<Metric> {
    let metric = |line: &'static str| {
        let fields: [&'static str; 4] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let [name, kind, labels, buckets] = fields;
        let list = |text: &'static str| text.split(',').filter(|word| *word != "-");
        let buckets = list(buckets).map(|bound| bound.parse().unwrap()).collect();
        Metric { name, kind, labels: list(labels).collect(), buckets }
    };
    UPSTREAM.lines().filter(|line| !line.starts_with('#')).map(metric).collect()
}

/// The labels of the samples with this name.
fn samples<'a>(text: &'a str, name: &str) -> Vec<Vec<(&'a str, &'a str)>> {
    let of_name = text.lines().filter_map(|line| line.strip_prefix(name));
    let of_name = of_name.filter(|rest| rest.starts_with(['{', ' ']));
    let labels = |rest: &'a str| {
        let inside =
            rest.strip_prefix('{').and_then(|rest| rest.rsplit_once('}')).map_or("", |(inside, _)| inside);
        let pairs = inside.split("\",").filter_map(|pair| pair.split_once("=\""));
        pairs.map(|(label, value)| (label, value.trim_end_matches('"'))).collect()
    };
    of_name.map(labels).collect()
}

/// Compares all samples with upstream. Returns the names of upstream's metrics that have no sample.
fn check(text: &str) -> BTreeSet<&'static str> {
    let mut absent = BTreeSet::new();
    for Metric { name, kind, labels, buckets } in upstream() {
        let is_histogram = kind == "histogram";
        let all = samples(text, &if is_histogram { format!("{name}_count") } else { name.to_owned() });
        if all.is_empty() {
            absent.insert(name);
            continue;
        }
        assert!(text.contains(&format!("# TYPE {name} {kind}\n")), "{name} is no {kind}");
        for sample in all {
            let found: BTreeSet<&str> = sample.iter().map(|(label, _)| *label).collect();
            assert_eq!(found, labels, "labels of {name}");
        }
        let bounds = samples(text, &format!("{name}_bucket")).into_iter().flatten();
        let bounds = bounds.filter(|(label, bound)| *label == "le" && *bound != "+Inf");
        let mut bounds: Vec<f64> = bounds.map(|(_, bound)| bound.parse().unwrap()).collect();
        bounds.sort_by(f64::total_cmp);
        bounds.dedup();
        assert_eq!(bounds, buckets, "buckets of {name}");
    }
    absent
}

#[tokio::test]
async fn metrics_have_upstreams_types_labels_and_buckets() {
    let server = Fixture::new().await;
    server.post(PODS, pod("p")).await;
    server.get(PODS).await;
    server.get("/api/v1/namespaces/default/endpoints").await;
    let request = Request::get(format!("{PODS}?watch=1")).header("authorization", "Bearer secret");
    let watch = server.api.handle(request.body(Full::<Bytes>::default()).unwrap(), None).await;
    assert_eq!(watch.status(), 200);
    let text = server.get("/metrics").await.body.as_str().unwrap().to_owned();
    let absent = check(&text);
    for name in [
        "apiserver_admission_step_admission_duration_seconds",
        "apiserver_cel_compilation_duration_seconds",
        "apiserver_cel_evaluation_duration_seconds",
        "apiserver_current_inflight_requests",
        "apiserver_flowcontrol_current_executing_requests",
        "apiserver_flowcontrol_current_executing_seats",
        "apiserver_flowcontrol_current_inqueue_requests",
        "apiserver_flowcontrol_current_inqueue_seats",
        "apiserver_flowcontrol_dispatched_requests_total",
        "apiserver_flowcontrol_lower_limit_seats",
        "apiserver_flowcontrol_nominal_limit_seats",
        "apiserver_flowcontrol_upper_limit_seats",
        "apiserver_longrunning_requests",
        "apiserver_request_duration_seconds",
        "apiserver_request_sli_duration_seconds",
        "apiserver_request_total",
        "apiserver_requested_deprecated_apis",
        "apiserver_response_sizes",
        "apiserver_storage_objects",
        "apiserver_watch_events_sizes",
        "apiserver_watch_events_total",
        "authentication_duration_seconds",
        "authorization_duration_seconds",
    ] {
        assert!(!absent.contains(name), "{name} is absent\n{text}");
    }
}
