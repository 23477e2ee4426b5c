"""exact_text: files that the agent must write, compared with what they should hold. 1.0 if all agree, else 0.

verifier.json declares
    files    {path: expected}, at least one; the path is absolute, or below the image's working directory.
             Expected is a text, or {"file": name} for a file among the tests.

White space at the end of a file does not count; everything before it must agree byte for byte. A file is read
as the agent would read it, up to 1 MB.

    {"files": {"/app/answer.txt": "42", "/app/report.csv": {"file": "report.csv"}}}
"""
from harness import OUTPUT, content, declaration, is_content, is_text, read, write_reward


def is_files(value):
    return (isinstance(value, dict) and value != {}
            and all(is_text(path) and is_content(expected) for path, expected in value.items()))


def main():
    declared = declaration({"files": is_files})
    wrong = 0
    for path, expected in declared["files"].items():
        wanted, got = content(expected).rstrip(), read(path, 2 * OUTPUT)
        agrees = got is not None and got.rstrip() == wanted
        wrong += not agrees
        print(f"{path}: {'as expected' if agrees else 'missing' if got is None else 'differs'}")
    write_reward(0.0, wrong == 0)


if __name__ == "__main__":
    main()
