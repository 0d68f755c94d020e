//! Finds and executes the program of a new process: its last step.

use std::borrow::Cow;
use std::ffi::{CString, OsStr};
use std::fs::OpenOptions;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use coracle_proto::shim::error::Kind;
use nix::errno::Errno;

/// Search path if the environment has no PATH, as in execvp(3).
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Maximum bytes that are read of a program: its ELF header, or the line with its interpreter, as in the kernel.
const HEADER_MAX: u64 = 256;
/// Maximum length of a chain of interpreters, as in the kernel.
const INTERPRETERS_MAX: usize = 5;

/// Executes the program. Returns only on failure, with the error.
pub(crate) fn become_program(args: &[String], env: &[CString]) -> (Kind, String) {
    let Some(name) = args.first().filter(|name| !name.is_empty()) else {
        return (Kind::CommandNotFound, "the command is empty".to_owned());
    };
    let Some(argv) = c_strings(args) else {
        return (Kind::Invalid, "the command contains a NUL byte".to_owned());
    };
    let mut worst = Errno::ENOENT;
    for path in candidates(name, path_of(env)) {
        let Ok(path) = CString::new(path) else { continue };
        let Err(errno) = nix::unistd::execve(&path, &argv, env);
        match errno {
            // Another directory of the search path may contain the program, as in a shell.
            Errno::ENOENT | Errno::ENOTDIR => {}
            Errno::EACCES => worst = errno,
            Errno::ENOEXEC => {
                let path = Path::new(OsStr::from_bytes(path.to_bytes()));
                return (Kind::CommandNotExecutable, wrong_format(name, path));
            }
            _ => {
                worst = errno;
                break;
            }
        }
    }
    refusal(name, worst)
}

fn refusal(name: &str, errno: Errno) -> (Kind, String) {
    let what = if name.contains('/') { "stat" } else { "search $PATH for" };
    match errno {
        Errno::ENOENT | Errno::ENOTDIR if name.contains('/') => {
            (Kind::CommandNotFound, format!("exec: \"{name}\": {what} {name}: no such file or directory"))
        }
        Errno::ENOENT | Errno::ENOTDIR => {
            (Kind::CommandNotFound, format!("exec: \"{name}\": executable file not found in $PATH"))
        }
        Errno::EACCES => (Kind::CommandNotExecutable, format!("exec: \"{name}\": permission denied")),
        errno => (Kind::CommandNotExecutable, format!("exec \"{name}\": {}", errno.desc())),
    }
}

/// The error of a program that the kernel cannot execute. A program for another processor is the usual cause.
fn wrong_format(name: &str, path: &Path) -> String {
    let (platform, own) = (platform_of(path), this_platform());
    match platform.filter(|platform| *platform != own) {
        Some(platform) => format!(
            "exec \"{name}\": exec format error: the program is for {platform}, this machine runs {own}; \
             use an image that is built for this machine"
        ),
        None => format!("exec \"{name}\": exec format error"),
    }
}

/// The platform of an ELF program, or of the interpreter of a script. `None` if the file is neither, or cannot be read.
fn platform_of(path: &Path) -> Option<Cow<'static, str>> {
    let mut path = path.to_owned();
    for _ in 0..INTERPRETERS_MAX {
        let header = header(&path)?;
        let Some(line) = header.strip_prefix(b"#!") else { return elf_platform(&header) };
        let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default().trim_ascii();
        let interpreter = line.split(u8::is_ascii_whitespace).next().unwrap_or_default();
        path = PathBuf::from(OsStr::from_bytes(interpreter));
    }
    None
}

/// The first bytes of a file.
fn header(path: &Path) -> Option<Vec<u8>> {
    // The file belongs to the container, which may have replaced it by a pipe.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    let mut header = Vec::new();
    file.take(HEADER_MAX).read_to_end(&mut header).ok()?;
    Some(header)
}

/// The platform in an ELF header (elf(5)): byte 5 is the byte order, bytes 18 and 19 are the machine.
fn elf_platform(header: &[u8]) -> Option<Cow<'static, str>> {
    let rest = header.strip_prefix(b"\x7fELF")?;
    let is_big_endian = *rest.get(1)? == 2;
    let machine = [*rest.get(14)?, *rest.get(15)?];
    let machine = if is_big_endian { u16::from_be_bytes(machine) } else { u16::from_le_bytes(machine) };
    Some(Cow::Borrowed(match machine {
        3 => "linux/386",
        21 if is_big_endian => "linux/ppc64",
        21 => "linux/ppc64le",
        22 => "linux/s390x",
        40 => "linux/arm",
        62 => "linux/amd64",
        183 => "linux/arm64",
        243 => "linux/riscv64",
        258 => "linux/loong64",
        other => return Some(Cow::Owned(format!("the ELF machine {other}"))),
    }))
}

/// The platform of this binary, with the name of the architecture in images.
fn this_platform() -> Cow<'static, str> {
    match std::env::consts::ARCH {
        "x86_64" => Cow::Borrowed("linux/amd64"),
        "aarch64" => Cow::Borrowed("linux/arm64"),
        other => Cow::Owned(format!("linux/{other}")),
    }
}

fn path_of(env: &[CString]) -> String {
    let path = env.iter().find_map(|entry| entry.to_bytes().strip_prefix(b"PATH="));
    path.map_or_else(
        || DEFAULT_PATH.to_owned(),
        |path| OsStr::from_bytes(path).to_string_lossy().into_owned(),
    )
}

fn candidates(name: &str, path: String) -> Vec<String> {
    if name.contains('/') {
        return vec![name.to_owned()];
    }
    // An empty entry, which would mean the working directory, is ignored: an image could run an unintended program
    // from there.
    path.split(':').filter(|dir| !dir.is_empty()).map(|dir| format!("{dir}/{name}")).collect()
}

/// Converts strings for execve. `None` if a string contains a NUL.
pub(crate) fn c_strings(strings: &[String]) -> Option<Vec<CString>> {
    strings.iter().map(|text| CString::new(text.as_bytes()).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_a_slash_is_not_searched_for() {
        assert_eq!(candidates("./x", "/bin:/usr/bin".into()), ["./x"]);
        assert_eq!(candidates("x", "/bin::/usr/bin".into()), ["/bin/x", "/usr/bin/x"]);
    }

    #[test]
    fn a_program_for_another_processor_is_reported_with_both_platforms() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = std::env::temp_dir().join(format!("coracle-program-{}", std::process::id()));
        std::fs::create_dir(&dir).expect("directory");
        let file = |name: &str, content: &[u8]| {
            let path = dir.join(name);
            std::fs::write(&path, content).expect("file");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("mode");
            path.to_str().expect("UTF-8").to_owned()
        };
        // Itanium, which no emulator of binfmt_misc runs.
        let mut header = [b"\x7fELF\x02\x01\x01".as_slice(), &[0; 57]].concat();
        header[16..20].copy_from_slice(&[2, 0, 50, 0]);
        let program = file("program", &header);
        let script = file("script", format!("#! {program} -x\necho\n").as_bytes());
        let own = this_platform();
        for path in [program, script] {
            let expected = format!(
                "exec \"{path}\": exec format error: the program is for the ELF machine 50, this machine runs {own}; \
                 use an image that is built for this machine"
            );
            assert_eq!(become_program(&[path], &[]), (Kind::CommandNotExecutable, expected));
        }
        let text = file("text", b"\0text");
        assert_eq!(
            become_program(std::slice::from_ref(&text), &[]).1,
            format!("exec \"{text}\": exec format error")
        );
        let loops = dir.join("loops").display().to_string();
        assert_eq!(platform_of(Path::new(&file("loops", format!("#!{loops}").as_bytes()))), None);
        std::fs::remove_dir_all(&dir).expect("removed");
    }

    #[test]
    fn the_platform_of_a_program_is_in_its_header() {
        assert_eq!(platform_of(Path::new("/proc/self/exe")), Some(this_platform()));
        let of = |order: u8, machine: [u8; 2]| {
            let mut header = [b"\x7fELF\x02".as_slice(), &[order], &[0; 14]].concat();
            header[18..20].copy_from_slice(&machine);
            elf_platform(&header).expect("an ELF program").into_owned()
        };
        assert_eq!(of(1, [183, 0]), "linux/arm64");
        assert_eq!(of(1, [2, 1]), "linux/loong64");
        assert_eq!(of(2, [0, 22]), "linux/s390x");
        assert_eq!(elf_platform(b"\x7fELF\x02\x01"), None, "a truncated header");
    }

    #[test]
    fn absent_and_forbidden_programs_are_distinguished() {
        assert_eq!(become_program(&["/no/such/file".into()], &[]).0, Kind::CommandNotFound);
        assert_eq!(become_program(&["no-such-name".into()], &[]).0, Kind::CommandNotFound);
        assert_eq!(become_program(&["/etc/passwd".into()], &[]).0, Kind::CommandNotExecutable);
        assert_eq!(become_program(&["/etc".into()], &[]).0, Kind::CommandNotExecutable);
    }
}
