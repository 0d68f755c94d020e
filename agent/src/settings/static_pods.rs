//! The sources of static pods, as settings.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use coracle_agent::{ManifestUrl, StaticPodSources};

use super::NodeSettings;

/// The path of manifests, and the URL of further manifests.
pub(super) fn decide(node: &NodeSettings) -> anyhow::Result<StaticPodSources> {
    let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_error| path.clone());
    Ok(StaticPodSources { path: node.pod_manifest_path.as_ref().map(absolute), url: url(node)? })
}

/// Checks the URL, its headers and its interval.
fn url(node: &NodeSettings) -> anyhow::Result<Option<ManifestUrl>> {
    let interval = node.http_check_frequency.0;
    anyhow::ensure!(interval >= Duration::from_secs(1), "http-check-frequency must be one second or longer");
    let Some(url) = &node.manifest_url else { return Ok(None) };
    // The message has no URL: its user or its query may have a secret.
    let url = ManifestUrl::new(url, &node.manifest_url_header, interval);
    Ok(Some(url.context("manifest-url and manifest-url-header cannot be used")?))
}

#[cfg(test)]
mod tests {
    use super::super::tests::node_settings;
    use super::*;

    fn of(text: &str) -> Result<Option<ManifestUrl>, String> {
        let sources = decide(&node_settings(text)?).map_err(|error| format!("{error:#}"))?;
        Ok(sources.url)
    }

    #[test]
    fn the_url_of_static_pods_is_off_by_default_and_checked() {
        assert!(of("").unwrap().is_none());
        let url = "manifest-url = \"https://host/pods\"";
        assert!(of(&format!("{url}\nmanifest-url-header = [\"A:b\"]")).unwrap().is_some());
        let error = of(&format!("{url}\nmanifest-url-header = [\"secret\"]")).unwrap_err();
        assert!(
            error.contains("header 1 is not of the form NAME:VALUE") && !error.contains("secret"),
            "{error}"
        );
        assert!(of("manifest-url = \"ftp://host/\"").unwrap_err().contains("http://HOST/PATH"));
        assert!(of("http-check-frequency = \"1ms\"").unwrap_err().contains("one second or longer"));
    }
}
