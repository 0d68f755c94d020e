//! Tests with valid and invalid documents of registries.

use std::collections::HashMap;

use super::platform::{Fitting, choose};
use super::search::UNMARKED_MAX;
use super::{Chosen, Document, ManifestError, Search, Step, parse, parse_config};
use crate::config::Platform;
use crate::digest::Digest;

fn platform(architecture: &str, variant: &str) -> Platform {
    Platform { os: "linux".into(), architecture: architecture.into(), variant: variant.into() }
}

fn index(platforms: &[&str]) -> Vec<u8> {
    let manifests: Vec<serde_json::Value> = platforms
        .iter()
        .map(|name| {
            let mut parts = name.split('/').chain(["", "", ""]);
            let mut part = || parts.next().unwrap_or_default();
            let platform = serde_json::json!({"os": part(), "architecture": part(), "variant": part()});
            let mut value = serde_json::json!({"digest": Digest::of(name.as_bytes()), "size": 1});
            if !name.is_empty() {
                value["platform"] = platform;
            }
            value
        })
        .collect();
    serde_json::to_vec(&serde_json::json!({"schemaVersion": 2, "manifests": manifests})).unwrap()
}

#[test]
fn the_best_platform_of_an_index_is_chosen() {
    let all = [
        "linux/arm64/v8",
        "linux/arm/v6",
        "linux/arm/v7",
        "windows/amd64",
        "linux/386",
        "linux/amd64/v3",
        "linux/amd64",
        "unknown/unknown",
    ];
    let cases: &[(&[&str], Platform, Option<&str>)] = &[
        (&all, platform("amd64", ""), Some("linux/amd64")),
        (&all, platform("amd64", "v3"), Some("linux/amd64/v3")),
        (&all, platform("arm64", "v8"), Some("linux/arm64/v8")),
        (&all, platform("arm", "v7"), Some("linux/arm/v7")),
        (&all, platform("arm", "v6"), Some("linux/arm/v6")),
        (&all, platform("riscv64", ""), None),
        (&["linux/amd64", "linux/riscv64"], platform("riscv64", ""), Some("linux/riscv64")),
        (&["linux/386", "windows/amd64"], platform("amd64", ""), Some("linux/386")),
        (&["linux/arm/v7"], platform("arm64", "v8"), Some("linux/arm/v7")),
        (&["linux/arm/v7"], platform("arm", "v6"), None),
        (&["linux/arm"], platform("arm", "v7"), Some("linux/arm")),
        (&["linux/amd64/v2"], platform("amd64", ""), None),
        (&["", "linux/386"], platform("amd64", ""), Some("linux/386")),
        (&[], platform("amd64", ""), None),
    ];
    for (platforms, wanted, expected) in cases {
        let Document::Index(manifests) = parse(&index(platforms)).unwrap() else { panic!("no index") };
        let chosen = match choose(&manifests, wanted) {
            Ok(Fitting::Marked(descriptor)) => Some(descriptor.digest),
            Ok(Fitting::Unmarked(all)) => panic!("{all:?}"),
            Err(_) => None,
        };
        assert_eq!(chosen, expected.map(|name| Digest::of(name.as_bytes())), "{platforms:?} for {wanted:?}");
    }
}

/// `scripts/test-arch` also runs this test on the other architectures.
#[test]
fn this_machine_gets_the_image_of_its_architecture() {
    let all = ["linux/s390x", "linux/riscv64", "linux/arm/v7", "linux/arm64/v8", "linux/amd64"];
    let expected = match std::env::consts::ARCH {
        "x86_64" => "linux/amd64",
        "aarch64" => "linux/arm64/v8",
        "arm" => "linux/arm/v7",
        "riscv64" => "linux/riscv64",
        other => panic!("{other} is not supported"),
    };
    let Document::Index(manifests) = parse(&index(&all)).unwrap() else { panic!("no index") };
    let Ok(Fitting::Marked(chosen)) = choose(&manifests, &Platform::host()) else { panic!("no image") };
    assert_eq!(chosen.digest, Digest::of(expected.as_bytes()));
}

/// Documents by digest.
#[derive(Default)]
struct Documents(HashMap<Digest, Vec<u8>>);

impl Documents {
    fn add(&mut self, value: &serde_json::Value) -> serde_json::Value {
        let bytes = value.to_string().into_bytes();
        let (digest, size) = (Digest::of(&bytes), bytes.len());
        self.0.insert(digest, bytes);
        serde_json::json!({"digest": digest, "size": size})
    }

    /// An image for `os/architecture/variant`. The descriptor states no platform.
    fn image(&mut self, name: &str) -> serde_json::Value {
        let mut parts = name.split('/').chain(["", "", ""]);
        let mut part = || parts.next().unwrap_or_default();
        let config = serde_json::json!({"os": part(), "architecture": part(), "variant": part()});
        let config = self.add(&config);
        self.add(&serde_json::json!({"schemaVersion": 2, "config": config, "layers": []}))
    }

    /// Searches from an index. Returns the platform of the result and the number of documents read.
    fn search(&self, manifests: &[serde_json::Value]) -> (Result<String, ManifestError>, usize) {
        let top = serde_json::json!({"schemaVersion": 2, "manifests": manifests}).to_string();
        let (wanted, mut read) = (platform("amd64", ""), 0);
        let get = |digest: &Digest| self.0.get(digest).cloned().unwrap();
        let mut search = Search::new(top.as_bytes(), &wanted).unwrap();
        loop {
            read += 1;
            match search.next() {
                Err(error) => return (Err(error), read),
                Ok(Step::Document(wanted)) => {
                    search.document(&wanted, &get(&wanted.descriptor.digest)).unwrap()
                }
                Ok(Step::Configuration(candidate)) => {
                    let config = get(&candidate.manifest.config.digest);
                    search.configuration(candidate, config).unwrap();
                }
                Ok(Step::Found(found)) => {
                    let config = get(&found.manifest.config.digest);
                    assert!(found.config.is_none_or(|known| known == config));
                    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
                    let text = |key: &str| config[key].as_str().unwrap().to_owned();
                    return (Ok(format!("{}/{}", text("os"), text("architecture"))), read - 1);
                }
            }
        }
    }
}

#[test]
fn images_without_a_platform_in_the_index_are_selected_by_configuration() {
    let mut documents = Documents::default();
    let [other, ours, small, windows, silent] =
        ["linux/s390x", "linux/amd64", "linux/386", "windows/amd64", "linux/"]
            .map(|name| documents.image(name));
    let signature = serde_json::json!({"mediaType": "application/vnd.example.signature+json", "digest": Digest::of(b"s"), "size": 1});
    let signature =
        documents.add(&serde_json::json!({"schemaVersion": 2, "config": signature, "layers": []}));
    let mut marked = small.clone();
    marked["platform"] = serde_json::json!({"os": "linux", "architecture": "386"});
    let nested = serde_json::json!({"schemaVersion": 2, "manifests": [other, ours]});
    let nested = documents.add(&nested);
    for (manifests, expected, reads) in [
        (vec![&other, &ours, &small], "linux/amd64", 4),
        (vec![&small, &other, &ours], "linux/amd64", 6),
        (vec![&small, &windows, &other], "linux/386", 6),
        (vec![&silent, &small], "linux/386", 4),
        (vec![&other, &silent], "linux/", 4),
        (vec![&signature, &ours], "linux/amd64", 3),
        (vec![&ours, &marked], "linux/386", 1),
        (vec![&other, &nested], "linux/amd64", 7),
    ] {
        let manifests: Vec<serde_json::Value> = manifests.into_iter().cloned().collect();
        let (found, read) = documents.search(&manifests);
        assert_eq!((found.unwrap().as_str(), read), (expected, reads), "{manifests:?}");
    }
    let (none, _) = documents.search(&[other.clone(), windows]);
    let none = none.unwrap_err();
    assert!(matches!(none, ManifestError::Platform { .. }), "{none:?}");
    assert!(none.to_string().contains("linux/s390x, windows/amd64"), "{none}");
    let (none, _) = documents.search(&[signature]);
    assert!(matches!(none, Err(ManifestError::Unsupported { .. })));
}

#[test]
fn the_number_of_documents_read_is_limited() {
    let mut documents = Documents::default();
    let (other, ours) = (documents.image("linux/s390x"), documents.image("linux/amd64"));
    let mut manifests = vec![other; UNMARKED_MAX - 1];
    manifests.push(ours.clone());
    assert!(documents.search(&manifests).0.is_ok());
    manifests.insert(0, manifests[0].clone());
    let (none, read) = documents.search(&manifests);
    assert!(none.is_err() && read == 2 * UNMARKED_MAX + 1, "{read}");
    // The nesting depth is limited too.
    let mut deep = ours;
    for depth in 0..4 {
        assert_eq!(documents.search(std::slice::from_ref(&deep)).0.is_ok(), depth < 3);
        deep = documents.add(&serde_json::json!({"schemaVersion": 2, "manifests": [deep]}));
    }
}

#[test]
fn documents_that_are_not_images_are_refused() {
    let digest = Digest::of(b"x");
    let descriptor = |media_type: &str, size: u64| serde_json::json!({"mediaType": media_type, "digest": digest, "size": size});
    let config = descriptor("application/vnd.oci.image.config.v1+json", 2);
    let layer = descriptor("application/vnd.oci.image.layer.v1.tar+gzip", 2);
    let manifest = |config: &serde_json::Value, layer: &serde_json::Value| {
        serde_json::json!({"schemaVersion": 2, "config": config, "layers": [layer]}).to_string()
    };
    assert!(matches!(parse(manifest(&config, &layer).as_bytes()), Ok(Document::Manifest(_))));
    let helm = descriptor("application/vnd.cncf.helm.config.v1+json", 2);
    let encrypted = descriptor("application/vnd.oci.image.layer.v1.tar+gzip+encrypted", 2);
    let huge = descriptor("application/vnd.oci.image.config.v1+json", 1 << 30);
    let refused = |text: &str| parse(text.as_bytes()).unwrap_err();
    assert!(matches!(refused(&manifest(&helm, &layer)), ManifestError::Unsupported { .. }));
    assert!(matches!(refused(&manifest(&config, &encrypted)), ManifestError::Unsupported { .. }));
    assert!(matches!(refused(&manifest(&huge, &layer)), ManifestError::Size { .. }));
    let endless = descriptor("application/vnd.oci.image.layer.v1.tar", u64::MAX);
    assert!(matches!(refused(&manifest(&config, &endless)), ManifestError::Size { .. }));
    assert!(matches!(refused(r#"{"schemaVersion":1,"name":"a","fsLayers":[]}"#), ManifestError::Schema1));
    assert!(matches!(refused("{}"), ManifestError::Unsupported { .. }));
    assert!(matches!(refused("[]"), ManifestError::Damaged(_)));
    let both = serde_json::json!({"config": config, "layers": [], "manifests": []}).to_string();
    assert!(matches!(refused(&both), ManifestError::Ambiguous));
    let bad_digest =
        serde_json::json!({"config": {"digest": "sha256:../../x", "size": 1}, "layers": []}).to_string();
    assert!(matches!(refused(&bad_digest), ManifestError::Damaged(_)));
}

#[test]
fn an_image_has_at_most_500_layers() {
    let descriptor = |media_type: &str| serde_json::json!({"mediaType": media_type, "digest": Digest::of(b"x"), "size": 2});
    let config = descriptor("application/vnd.oci.image.config.v1+json");
    let layer = descriptor("application/vnd.oci.image.layer.v1.tar+gzip");
    let parsed = |layers: usize| {
        let layers = vec![layer.clone(); layers];
        let manifest = serde_json::json!({"schemaVersion": 2, "config": config, "layers": layers});
        parse(manifest.to_string().as_bytes())
    };
    assert!(matches!(parsed(500), Ok(Document::Manifest(_))));
    assert!(matches!(parsed(501), Err(ManifestError::Layers(501))));
}

/// CVE-2026-95839: a malformed digest in an index ended the process. CVE-2024-3727: a digest was a path.
#[test]
fn cve_2026_95839_malformed_digests_of_indexes_and_layers_are_refused() {
    let good = Digest::of(b"x").to_string();
    let documents = |digest: &str| {
        let [bad, good] =
            [digest, good.as_str()].map(|digest| serde_json::json!({"digest": digest, "size": 1}));
        [
            serde_json::json!({"schemaVersion": 2, "manifests": [good, bad]}),
            serde_json::json!({"schemaVersion": 2, "config": good, "layers": [good, bad]}),
        ]
    };
    for document in documents(&good) {
        parse(document.to_string().as_bytes()).unwrap();
    }
    let (upper, short) = (good.to_uppercase(), &good[..good.len() - 1]);
    for malformed in
        ["", ":", "sha256", "sha256:", "sha256:é", "sha256:../../x", "md5:00", upper.as_str(), short, "\0"]
    {
        for document in documents(malformed) {
            let refused = parse(document.to_string().as_bytes());
            assert!(matches!(refused, Err(ManifestError::Damaged(_))), "{document}: {refused:?}");
        }
    }
}

#[test]
fn null_means_absent_and_old_configuration_types_are_accepted() {
    let digest = Digest::of(b"x");
    let descriptor = serde_json::json!({"mediaType": null, "digest": digest, "size": 1, "annotations": null,
        "urls": null, "platform": null, "data": null, "artifactType": null});
    let manifest = serde_json::json!({"schemaVersion": 2, "config": descriptor, "layers": [descriptor],
        "manifests": null, "annotations": null, "subject": null});
    assert!(matches!(parse(manifest.to_string().as_bytes()), Ok(Document::Manifest(_))));
    let platform =
        serde_json::json!({"architecture": "amd64", "os": "linux", "variant": null, "os.features": null});
    let mut entry = descriptor.clone();
    entry["platform"] = platform;
    let index = serde_json::json!({"schemaVersion": 2, "manifests": [entry], "config": null, "layers": null});
    assert!(matches!(parse(index.to_string().as_bytes()), Ok(Document::Index(_))));
    // Registries, and Docker before 1.13, lost the type of configurations.
    for media_type in ["application/octet-stream", "application/json", "text/html"] {
        let mut manifest = manifest.clone();
        manifest["config"]["mediaType"] = media_type.into();
        let parsed = parse(manifest.to_string().as_bytes());
        assert!(matches!(parsed, Ok(Document::Manifest(_))), "{media_type}: {parsed:?}");
    }
}

#[test]
fn configurations_of_all_builders_are_parsed() {
    let diff_id = Digest::of(b"layer");
    let host = platform("amd64", "");
    let text = format!(
        r#"{{"architecture":"amd64","os":"linux","created":null,"config":{{"Env":["A=b"],"Cmd":null,"Volumes":{{"/data":{{}}}},
        "ExposedPorts":null,"Labels":null,"User":"12:34","StopSignal":"SIGQUIT","OnBuild":null}},
        "rootfs":{{"type":"layers","diff_ids":["{diff_id}"]}},"history":[{{"created_by":"x"}}]}}"#
    );
    let parsed = parse_config(text.as_bytes(), 1, &host, Chosen::Direct).unwrap();
    let process = parsed.config.config().as_ref().unwrap();
    assert_eq!(process.volumes().as_deref(), Some(["/data".to_owned()].as_slice()));
    assert_eq!((process.user().as_deref(), process.cmd()), (Some("12:34"), &None));
    assert_eq!(parsed.diff_ids, [diff_id]);
    // Some builders omit these fields.
    assert!(parse_config(b"{}", 0, &host, Chosen::Direct).is_ok());
    assert!(parse_config(br#"{"rootfs":{"diff_ids":null}}"#, 0, &host, Chosen::Direct).is_ok());
    assert!(matches!(
        parse_config(text.as_bytes(), 2, &host, Chosen::Direct),
        Err(ManifestError::Count { .. })
    ));
    assert!(matches!(parse_config(b"{", 0, &host, Chosen::Direct), Err(ManifestError::Config(_))));
}

#[test]
fn a_configuration_takes_limited_memory() {
    let host = platform("amd64", "");
    let parse = |config: serde_json::Value| {
        parse_config(config.to_string().as_bytes(), 0, &host, Chosen::Direct).map(|parsed| parsed.config)
    };
    let empty = vec![serde_json::json!({}); 30_000];
    let config = parse(serde_json::json!({"history": empty, "unknown": empty})).unwrap();
    assert_eq!(config.history().as_ref().map(Vec::len), Some(1000));
    let many = parse(serde_json::json!({"config": {"Env": vec![""; 30_000]}}));
    assert!(matches!(many, Err(ManifestError::ConfigValues(_))), "{many:?}");
}

#[test]
fn a_single_image_may_be_for_another_processor_but_not_for_another_system() {
    let arm = platform("arm64", "v8");
    let config = |os: &str| format!(r#"{{"architecture":"amd64","os":"{os}"}}"#);
    for (os, chosen, taken) in [
        ("linux", Chosen::Direct, true),
        ("", Chosen::Direct, true),
        ("windows", Chosen::Direct, false),
        ("linux", Chosen::ByPlatform, true),
        ("linux", Chosen::Unmarked, false),
    ] {
        let parsed = parse_config(config(os).as_bytes(), 0, &arm, chosen);
        assert_eq!(parsed.is_ok(), taken, "{os} {chosen:?}");
        assert!(taken || matches!(parsed, Err(ManifestError::Platform { .. })));
    }
}
