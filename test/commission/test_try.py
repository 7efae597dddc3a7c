def test_try(commission):
    import os, json

    done = commission(json.loads(os.environ["FAULTS"]))
    pass
    print(done.said[-2500:], done.status)
    print(json.dumps(done.figures, indent=0)[:6000])
    if done.options().exists():
        print(done.options().read_text())
