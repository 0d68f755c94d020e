//! Tests with providers that are shell scripts.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use coracle_images::Reference;
use tempfile::TempDir;

use super::{CACHE_MAX, CachedCredentials, Key, MAX_CACHE_TIME, ProviderError, Providers, keep};

/// A provider with this response, which counts its calls in `calls`.
fn place(answer: &str) -> TempDir {
    let place = tempfile::tempdir().unwrap();
    let script = format!(
        "#!/bin/sh\ncat >>{0}/calls\necho >>{0}/calls\ncat <<END\n{answer}\nEND\n",
        place.path().display()
    );
    program(place.path(), &script);
    place
}

/// Writes the script in another process: a fork of another test's thread would inherit the writable descriptor, and
/// executing the script would fail with ETXTBSY.
fn program(place: &Path, script: &str) {
    let written = std::process::Command::new("sh")
        .args(["-c", r#"printf %s "$1" >helper && chmod 755 helper"#, "sh", script])
        .current_dir(place)
        .status();
    assert!(written.unwrap().success());
}

fn load(place: &Path, provider: &str) -> Result<Providers, ProviderError> {
    let file = place.join("config.yaml");
    let text = format!(
        "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n- name: helper\n{provider}"
    );
    std::fs::write(&file, text).unwrap();
    Providers::load(&file, place)
}

/// Maximum duration of a step on a slow machine.
const LONG: std::time::Duration = std::time::Duration::from_secs(55);

const PLAIN: &str = "  apiVersion: credentialprovider.kubelet.k8s.io/v1
  matchImages: ['*.example.com', 'r.example.org/team']
  defaultCacheDuration: 10m
  env: [{name: WHO, value: me}]
";

fn answer(key: &str, lasts: &str) -> String {
    format!(
        r#"{{"apiVersion":"credentialprovider.kubelet.k8s.io/v1","kind":"CredentialProviderResponse","cacheKeyType":"{key}",{lasts}"auth":{{"*.example.com":{{"username":"$WHO","password":"p"}},"other.example":{{"username":"no","password":"no"}}}}}}"#
    )
}

fn calls(place: &Path) -> Vec<String> {
    std::fs::read_to_string(place.join("calls")).unwrap_or_default().lines().map(str::to_owned).collect()
}

async fn users(providers: &Providers, image: &str) -> Vec<String> {
    let found = providers.credentials(&Reference::parse(image).unwrap()).await;
    found.into_iter().map(|(_, auth)| auth.username).collect()
}

#[tokio::test]
async fn a_provider_is_called_for_its_images_and_its_response_is_cached() {
    // The number of calls for four pulls, with each key type.
    for (key, lasts, expected) in [
        ("Image", "", 3),
        ("Registry", "", 2),
        ("Global", "", 1),
        ("Global", r#""cacheDuration":"0s","#, 4),
        ("Image", r#""cacheDuration":"1h","#, 3),
    ] {
        let place = place(&answer(key, lasts));
        let providers = load(place.path(), PLAIN).unwrap();
        for image in ["a.example.com/x:1", "a.example.com/x:2", "a.example.com/y", "b.example.com/x"] {
            assert_eq!(users(&providers, image).await, ["me"], "{key} {image}");
        }
        let calls = calls(place.path());
        assert_eq!(calls.len(), expected, "{key} {lasts} {calls:?}");
        let request: serde_json::Value = serde_json::from_str(&calls[0]).unwrap();
        assert_eq!(request["image"], "a.example.com/x");
        assert_eq!(request["kind"], "CredentialProviderRequest");
        assert!(
            users(&providers, "nginx").await.is_empty()
                && users(&providers, "r.example.org/other").await.is_empty()
        );
    }
}

#[tokio::test]
async fn a_long_response_of_a_provider_gives_no_credentials() {
    for (spaces, expected) in [(1 << 10, vec!["me"]), (1 << 20, vec![])] {
        let place = place("");
        let response = answer("Image", "");
        let script = format!(
            "#!/bin/sh\ncat >/dev/null\nhead -c {spaces} /dev/zero | tr '\\000' ' '\ncat <<END\n{response}\nEND\n"
        );
        program(place.path(), &script);
        let providers = load(place.path(), PLAIN).unwrap();
        assert_eq!(users(&providers, "a.example.com/x").await, expected, "{spaces}");
    }
}

#[tokio::test]
async fn a_provider_that_fails_gives_no_credentials() {
    for bad in [
        "",
        "no json",
        r#"{"kind":"Other"}"#,
        &answer("Sometimes", ""),
        &answer("Image", r#""cacheDuration":"x","#),
    ] {
        let place = place(bad);
        let providers = load(place.path(), PLAIN).unwrap();
        assert!(users(&providers, "a.example.com/x").await.is_empty(), "{bad}");
    }
    let place = place("");
    program(place.path(), "#!/bin/sh\necho sorry >&2\nexit 3\n");
    let providers = load(place.path(), PLAIN).unwrap();
    let result = providers.0[0].ask("a.example.com/x").await;
    let error = result.answer.err().unwrap().to_string();
    assert!(error.contains("sorry") && error.contains('3'), "{error}");
}

/// A provider whose calls wait until this number of calls run, and then a little longer.
fn meeting(place: &Path, calls: usize, key: &str) {
    let script = format!(
        "#!/bin/sh\necho >>{0}/calls\nwhile test $(wc -l <{0}/calls) -lt {calls}; do sleep 0.05; done\ncat <<END\n{1}\nEND\n",
        place.display(),
        answer(key, r#""cacheDuration":"0s","#)
    );
    program(place, &script);
}

#[tokio::test]
async fn calls_for_different_images_run_side_by_side_and_equal_ones_are_one() {
    let place = place("");
    // None of the three calls ends before the others have started.
    meeting(place.path(), 3, "Image");
    let providers = load(place.path(), PLAIN).unwrap();
    let images = ["a.example.com/x", "a.example.com/y", "b.example.com/x", "a.example.com/x:2"];
    let all = images.map(|image| users(&providers, image));
    let all = tokio::time::timeout(LONG, futures::future::join_all(all)).await.unwrap();
    assert!(all.iter().all(|users| *users == ["me"]), "{all:?}");
    assert_eq!(calls(place.path()).len(), 3);
    // The response is not cached: a later caller runs the program again.
    users(&providers, "a.example.com/x").await;
    assert_eq!(calls(place.path()).len(), 4);
}

#[tokio::test]
async fn a_shared_response_needs_one_call_also_for_concurrent_pulls() {
    for (key, lasts, expected) in [("Registry", 2, 3), ("Global", 1, 2)] {
        let place = place("");
        meeting(place.path(), 1, key);
        let providers = load(place.path(), PLAIN).unwrap();
        // The first response decides for which requests it is valid.
        users(&providers, "c.example.com/x").await;
        meeting(place.path(), 1 + lasts, key);
        let images = ["a.example.com/x", "a.example.com/y", "b.example.com/x", "b.example.com/y"];
        let all = images.map(|image| users(&providers, image));
        let all = tokio::time::timeout(LONG, futures::future::join_all(all)).await.unwrap();
        assert!(all.iter().all(|users| *users == ["me"]), "{all:?}");
        assert_eq!(calls(place.path()).len(), expected, "{key}");
    }
}

#[tokio::test]
async fn a_call_whose_pull_is_cancelled_is_made_by_a_waiter() {
    let place = place("");
    meeting(place.path(), 2, "Image");
    let providers = load(place.path(), PLAIN).unwrap();
    let mut first = Box::pin(users(&providers, "a.example.com/x"));
    let mut second = Box::pin(users(&providers, "a.example.com/x"));
    coracle_testing::eventually_async("the first call", 10, async || {
        assert!(futures::poll!(&mut first).is_pending());
        !calls(place.path()).is_empty()
    })
    .await;
    assert!(futures::poll!(&mut second).is_pending());
    drop(first);
    assert_eq!(tokio::time::timeout(LONG, second).await.unwrap(), ["me"]);
    assert_eq!(calls(place.path()).len(), 2);
    assert!(providers.0[0].flights.is_empty());
}

#[tokio::test]
async fn a_cancelled_call_ends_the_children_of_the_program() {
    let place = place("");
    let file = place.path().join("child");
    program(place.path(), &format!("#!/bin/sh\nsleep 1000 & echo $! >{}\nwait\n", file.display()));
    let providers = load(place.path(), PLAIN).unwrap();
    let mut pull = Box::pin(users(&providers, "a.example.com/x"));
    let child = coracle_testing::eventually_async("the child of the program", 10, async || {
        assert!(futures::poll!(&mut pull).is_pending());
        let text = std::fs::read_to_string(&file).ok()?;
        text.strip_suffix('\n').map(str::to_owned)
    })
    .await;
    drop(pull);
    let lives = || {
        let stat = std::fs::read_to_string(format!("/proc/{child}/stat"));
        stat.is_ok_and(|stat| !stat.contains(") Z "))
    };
    coracle_testing::until("the child of the program is killed", 10, || !lives()).await;
}

#[test]
fn wrong_configurations_are_refused_by_name() {
    let place = place("");
    for (provider, part) in [
        ("  matchImages: ['a']\n  defaultCacheDuration: 1m\n", "apiVersion"),
        ("  apiVersion: credentialprovider.kubelet.k8s.io/v1\n  defaultCacheDuration: 1m\n", "matchImages"),
        (
            "  apiVersion: credentialprovider.kubelet.k8s.io/v1\n  matchImages: ['a']\n",
            "defaultCacheDuration",
        ),
        (&format!("{PLAIN}  tokenAttributes: {{}}\n"), "tokenAttributes"),
        (&format!("{PLAIN}- name: helper\n{PLAIN}"), "twice"),
        (&format!("{PLAIN}- name: ../helper\n{PLAIN}"), "name"),
        (&format!("{PLAIN}- name: absent\n{PLAIN}"), "absent"),
        (&format!("{PLAIN}  unknown: 1\n"), "cannot parse"),
    ] {
        let error = load(place.path(), provider).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    }
    let file = place.path().join("other.yaml");
    std::fs::write(&file, "apiVersion: v1\nkind: ConfigMap\n").unwrap();
    assert!(matches!(Providers::load(&file, place.path()), Err(ProviderError::Kind { .. })));
}

#[test]
fn many_images_take_bounded_memory() {
    let mut all = HashMap::new();
    for number in 0..10 * CACHE_MAX {
        let kept =
            CachedCredentials { until: std::time::Instant::now() + MAX_CACHE_TIME, entries: BTreeMap::new() };
        keep(&mut all, Key::Image(number.to_string()), kept);
        assert!(all.len() <= CACHE_MAX && all.contains_key(&Key::Image(number.to_string())));
    }
}

#[test]
fn a_configuration_that_is_too_large_is_refused() {
    let place = place("");
    assert!(load(place.path(), PLAIN).is_ok());
    let long = format!("{PLAIN}# {}\n", "x".repeat(1 << 20));
    assert!(matches!(load(place.path(), &long), Err(ProviderError::Read { .. })));
}
