//! The Debian package and the tarball of `scripts/package`. The tests install nothing.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use coracle_integration::{Machine, repository};
use coracle_testing::run;

/// The built files of one run.
struct Packages {
    debian: PathBuf,
    tarball: PathBuf,
    sums: PathBuf,
}

/// A small program that runs the real one. To compress the real one twice would take a minute.
fn program(dir: &Path) -> PathBuf {
    let path = dir.join("coracle");
    fs::write(&path, format!("#!/bin/sh\nexec {} \"$@\"\n", Machine::coracle().display())).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// Runs `scripts/package` in a shell with this umask and time zone.
fn package(program: &Path, out: &Path, umask: &str, zone: &str) -> Packages {
    let script =
        format!("umask {umask}; exec {} {}", repository().join("scripts/package").display(), out.display());
    let output = Command::new("bash")
        .args(["-c", &script])
        .env("CORACLE", program)
        .env("SOURCE_DATE_EPOCH", "1700000000")
        .env("TZ", zone)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let [debian, tarball, sums] = text.lines().map(PathBuf::from).collect::<Vec<_>>().try_into().unwrap();
    Packages { debian, tarball, sums }
}

fn build() -> (tempfile::TempDir, Packages) {
    let dir = tempfile::tempdir().unwrap();
    let packages = package(&program(dir.path()), &dir.path().join("out"), "022", "UTC");
    (dir, packages)
}

/// A file in an archive.
struct ArchivedFile {
    /// Names of user and group, as `root/root`.
    owner: String,
    /// Type and mode, as `-rw-r--r--`.
    mode: String,
    path: String,
}

/// The files of an archive's listing in the form of `tar -tv`.
fn files(listing: &str) -> Vec<ArchivedFile> {
    let rows = listing.lines().map(|line| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
    rows.map(|row| ArchivedFile { owner: row[1].clone(), mode: row[0].clone(), path: row[5].clone() })
        .collect()
}

#[test]
fn two_runs_write_identical_packages() {
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path());
    let first = package(&program, &dir.path().join("first"), "022", "UTC");
    let second = package(&program, &dir.path().join("second"), "077", "Asia/Tokyo");
    for (a, b) in [(first.debian, second.debian), (first.tarball, second.tarball), (first.sums, second.sums)]
    {
        assert_eq!(a.file_name(), b.file_name());
        assert!(fs::read(&a).unwrap() == fs::read(&b).unwrap(), "{} differs", a.display());
    }
}

#[test]
fn the_debian_package_has_program_services_pages_and_completions_of_root() {
    let (_dir, packages) = build();
    let listing = files(&run("dpkg-deb", &["--contents", packages.debian.to_str().unwrap()]));
    for ArchivedFile { owner, mode, path } in &listing {
        assert_eq!(owner, "root/root", "{path}");
        let expected = match () {
            () if path.ends_with('/') => "drwxr-xr-x",
            () if path.ends_with("/coracle") && (path.contains("bin/") || path.contains("openrc/")) => {
                "-rwxr-xr-x"
            }
            () => "-rw-r--r--",
        };
        assert_eq!(mode, expected, "{path}");
    }
    for path in [
        "./etc/coracle/",
        "./usr/bin/coracle",
        "./usr/lib/systemd/system/coracle.service",
        "./usr/lib/systemd/system/coracle-agent.service",
        "./usr/share/bash-completion/completions/coracle",
        "./usr/share/doc/coracle/copyright",
        "./usr/share/doc/coracle/.github/SECURITY.md",
        "./usr/share/doc/coracle/docs/install.md",
        "./usr/share/doc/coracle/examples/web.yaml",
        "./usr/share/fish/vendor_completions.d/coracle.fish",
        "./usr/share/man/man1/coracle-up.1.gz",
        "./usr/share/man/man1/coracle.1.gz",
        "./usr/share/zsh/vendor-completions/_coracle",
    ] {
        assert!(listing.iter().any(|file| file.path == path), "{path}");
    }
}

#[test]
fn the_debian_package_enables_nothing_and_its_scripts_are_correct() {
    let (dir, packages) = build();
    let debian = packages.debian.to_str().unwrap();
    assert_eq!(run("dpkg-deb", &["--field", debian, "Package"]).trim(), "coracle");
    let version = run("dpkg-deb", &["--field", debian, "Version"]);
    let program = run(Machine::coracle().to_str().unwrap(), &["version"]);
    assert_eq!(program.trim(), format!("coracle {}", version.trim()));

    let (control, content) = (dir.path().join("control"), dir.path().join("content"));
    run("dpkg-deb", &["--control", debian, control.to_str().unwrap()]);
    run("dpkg-deb", &["--extract", debian, content.to_str().unwrap()]);
    for script in ["postinst", "prerm", "postrm"] {
        let path = control.join(script);
        run("sh", &["-n", path.to_str().unwrap()]);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("#!/bin/sh\nset -e\n"), "{script}");
        assert!(!text.contains("enable ") && !text.contains("invoke start"), "{script} starts a service");
        assert!(!text.contains("/var/lib/coracle\n") && !text.contains("rm -r"), "{script} removes data");
    }
    // On an upgrade the old version's prerm has the argument `upgrade`: pods keep running.
    run("sh", &[control.join("prerm").to_str().unwrap(), "upgrade", "9.9.9"]);
    let checked = Command::new("md5sum")
        .args(["--check", "--quiet"])
        .arg(control.join("md5sums"))
        .current_dir(&content)
        .status();
    assert!(checked.unwrap().success(), "md5sums");
}

#[test]
fn packages_of_the_node_alone_have_another_name_and_only_its_service() {
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path());
    // Like a binary without the control plane, the program makes no man page of `coracle up`.
    let without =
        format!("{}\n[ \"$1\" != man ] || rm \"$2/coracle-up.1\"\n", fs::read_to_string(&program).unwrap());
    fs::write(&program, without.replace("exec ", "set -e\n")).unwrap();
    let packages = package(&program, &dir.path().join("out"), "022", "UTC");
    let debian = packages.debian.to_str().unwrap();
    for (field, value) in [("Package", "coracle-node"), ("Conflicts", "coracle")] {
        assert_eq!(run("dpkg-deb", &["--field", debian, field]).trim(), value);
    }
    let listing = run("dpkg-deb", &["--contents", debian]);
    assert!(listing.contains("/usr/bin/coracle\n") && listing.contains("system/coracle-agent.service\n"));
    assert!(!listing.contains("system/coracle.service\n"), "{listing}");
    let control = dir.path().join("control");
    run("dpkg-deb", &["--control", debian, control.to_str().unwrap()]);
    for script in ["postinst", "prerm"] {
        let text = fs::read_to_string(control.join(script)).unwrap();
        assert!(
            text.contains("coracle-agent.service") && !text.contains("coracle.service"),
            "{script}: {text}"
        );
    }
    let tarball = packages.tarball.file_name().unwrap().to_str().unwrap();
    assert!(tarball.starts_with("coracle-node-"), "{tarball}");
}

#[test]
fn the_tarball_has_the_services_of_both_init_systems_and_the_checksums_are_right() {
    let (dir, packages) = build();
    let listing = files(&run("tar", &["-tvzf", packages.tarball.to_str().unwrap()]));
    let name = packages.tarball.file_name().unwrap().to_str().unwrap().trim_end_matches(".tar.gz");
    for ArchivedFile { owner, path, .. } in &listing {
        assert_eq!(owner, "0/0", "{path}");
        assert!(path.starts_with(&format!("{name}/")), "{path}");
    }
    for path in ["bin/coracle", "LICENSE", "examples/openrc/coracle", "examples/systemd/coracle.service"] {
        assert!(listing.iter().any(|file| file.path == format!("{name}/{path}")), "{path}");
    }
    let checked = Command::new("sha256sum")
        .args(["--check", "--strict", "--quiet"])
        .arg(&packages.sums)
        .current_dir(dir.path().join("out"))
        .status();
    assert!(checked.unwrap().success(), "SHA256SUMS");
}

/// Alpine mounts the cgroup hierarchies only if a service asks for them. Without them no node starts. A service that is
/// needed, but does not exist, prevents the start.
#[test]
fn the_service_of_openrc_asks_for_cgroups_and_needs_no_service() {
    let script = fs::read_to_string(repository().join("examples/openrc/coracle")).unwrap();
    assert!(script.lines().any(|line| line.trim() == "want cgroups"), "{script}");
    assert!(!script.lines().any(|line| line.trim().starts_with("need ")), "{script}");
}

#[test]
fn systemd_accepts_the_services_without_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    let units = ["coracle.service", "coracle-agent.service"].map(|name| {
        let text = fs::read_to_string(repository().join("examples/systemd").join(name)).unwrap();
        // Neither the program nor its pages are installed on the test machine.
        let lines = text.lines().filter(|line| !line.starts_with("Documentation="));
        let lines: Vec<String> = lines.map(|line| line.replace("/usr/bin/coracle", "/bin/true")).collect();
        let unit = dir.path().join(name);
        fs::write(&unit, lines.join("\n") + "\n").unwrap();
        unit
    });
    let output = Command::new("systemd-analyze").arg("verify").args(&units).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    let warnings: Vec<&str> = errors.lines().filter(|line| line.contains("coracle")).collect();
    assert!(output.status.success() && warnings.is_empty(), "{errors}");
    run("sh", &["-n", repository().join("examples/openrc/coracle").to_str().unwrap()]);
}
