//! Filters of list requests. Pure. The caller has replaced prefixes of ids by whole ids.

use std::collections::HashMap;

use coracle_proto::cri;

/// Whether `labels` match `selector`.
pub(crate) fn matches_labels(labels: &HashMap<String, String>, selector: &HashMap<String, String>) -> bool {
    selector.iter().all(|(key, value)| labels.get(key) == Some(value))
}

/// Whether an id is the requested id. Every id matches an empty request.
pub(crate) fn matches_id(id: &str, requested: &str) -> bool {
    requested.is_empty() || id == requested
}

/// Whether a request selects all objects: it has no filter, or an empty one.
pub(crate) fn selects_all<F: Default + PartialEq>(filter: Option<&F>) -> bool {
    filter.is_none_or(|filter| *filter == F::default())
}

/// The fields that filters match.
pub(crate) struct Subject<'a> {
    pub(crate) id: &'a str,
    /// The sandbox of a container; empty for sandboxes.
    pub(crate) sandbox_id: &'a str,
    pub(crate) state: i32,
    pub(crate) labels: &'a HashMap<String, String>,
}

/// Whether a sandbox matches the filter.
pub(crate) fn sandbox(item: &Subject<'_>, filter: Option<&cri::PodSandboxFilter>) -> bool {
    filter.is_none_or(|filter| {
        matches_id(item.id, &filter.id)
            && filter.state.as_ref().is_none_or(|wanted| wanted.state == item.state)
            && matches_labels(item.labels, &filter.label_selector)
    })
}

/// Whether a container matches the filter.
pub(crate) fn container(item: &Subject<'_>, filter: Option<&cri::ContainerFilter>) -> bool {
    filter.is_none_or(|filter| {
        matches_id(item.id, &filter.id)
            && matches_id(item.sandbox_id, &filter.pod_sandbox_id)
            && filter.state.as_ref().is_none_or(|wanted| wanted.state == item.state)
            && matches_labels(item.labels, &filter.label_selector)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn all_parts_of_a_filter_must_match() {
        let item = Subject {
            id: "c0ffee",
            sandbox_id: "beef",
            state: cri::ContainerState::ContainerRunning.into(),
            labels: &labels(&[("a", "1"), ("b", "2")]),
        };
        let running = cri::ContainerStateValue { state: cri::ContainerState::ContainerRunning.into() };
        let exited = cri::ContainerStateValue { state: cri::ContainerState::ContainerExited.into() };
        let cases: [(cri::ContainerFilter, bool); 8] = [
            (cri::ContainerFilter::default(), true),
            (cri::ContainerFilter { id: "c0ffee".into(), ..Default::default() }, true),
            (cri::ContainerFilter { id: "c0f".into(), ..Default::default() }, false),
            (cri::ContainerFilter { id: "d".into(), ..Default::default() }, false),
            (
                cri::ContainerFilter {
                    pod_sandbox_id: "beef".into(),
                    state: Some(running),
                    ..Default::default()
                },
                true,
            ),
            (cri::ContainerFilter { state: Some(exited), ..Default::default() }, false),
            (cri::ContainerFilter { label_selector: labels(&[("a", "1")]), ..Default::default() }, true),
            (
                cri::ContainerFilter {
                    label_selector: labels(&[("a", "1"), ("c", "")]),
                    ..Default::default()
                },
                false,
            ),
        ];
        for (filter, expected) in cases {
            assert_eq!(container(&item, Some(&filter)), expected, "{filter:?}");
        }
        assert!(container(&item, None));
    }
}
